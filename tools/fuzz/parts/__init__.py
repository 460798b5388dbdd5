"""The parts: a module each, named by its file. What a part is: :class:`fuzz.case.Part`."""
