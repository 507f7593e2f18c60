"""The seam: the verbs of every transport, and rooms for optional abilities."""
