"""Proof that a plan gives the numbers of the plain run: `memtrain verify`, and the tests of exactness."""
