"""NBD exports: connection.py moves bytes, source.py is what the engine reads, tls.py and libnbd.py bind the library."""
