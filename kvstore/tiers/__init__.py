"""The media of a node: I/O and nothing else. What goes where, and what follows an outcome, is decided in kvstore/core."""
