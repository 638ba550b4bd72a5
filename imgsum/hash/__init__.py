"""Block digests, and the checksum that is made of them."""
