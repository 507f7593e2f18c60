"""A store: the seam on a relational database."""
