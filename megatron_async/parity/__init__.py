"""Does an engine say what a reference says, and if not, was the reference undecided?"""
