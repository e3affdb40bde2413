"""A plugin for kvtier that uses every hook."""
