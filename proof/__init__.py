"""What shows that the library keeps its promises, and is not part of the wheel."""
