"""Measurements of the store, each as a ratio to something measured in the same run: `python -m bench --help`.

Speeds differ from machine to machine and from minute to minute; ratios of things that take turns differ less.
Nothing here asserts a speed; the bars of `bench.scenarios` are for people who change the hot path.
"""
