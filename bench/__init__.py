"""Measurements of the store, each as a ratio to another measurement of the same run: `python -m bench --help`.

Speeds differ between machines and between minutes; ratios of alternating measurements differ less. No test asserts a
speed; the bars of `bench.scenarios` are for people who change the hot path.
"""
