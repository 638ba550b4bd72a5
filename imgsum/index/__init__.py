"""An index: the block digests of an image in a file. Folded, it gives the image's checksum, so it proves itself."""
