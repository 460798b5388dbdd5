"""Helpers independent of convolutions: files, console, bounded tables, facts about machines."""
