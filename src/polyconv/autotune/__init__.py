"""Autotuning: online measurement while a program runs, preferences, and tuning files.

``polyconv tune`` and :func:`polyconv.optimize` measure and write a tuning file, which the backends consult when they
first plan a problem. Each section of a file names the environment it was measured in, so that one file in a repository
can serve several devices.
"""
