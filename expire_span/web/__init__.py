"""What the servers of this package share: who may ask, how much, and how long a client may let a server wait."""
