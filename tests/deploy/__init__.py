"""Tests of the files in deploy/, and of what kvtier does for them."""
