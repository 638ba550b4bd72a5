"""qcow2 read natively: the clusters go straight from the file to whoever asked.

Read in the order in which an image is opened and read:

    header.py      the header, its extensions and the snapshot table, with every limit
    tables.py      slices of L1 and L2 tables, and a cache of them
    mapping.py     guest range -> zero, data or compressed, through the layers of a backing chain
    compressed.py  deflate and zstd
    audit.py       what --untrusted demands of a mapping
    source.py      Source and Reader over these, and the opening of backing chains and data files

The rules are those of QEMU's docs/interop/qcow2.txt (`spec`) and of its driver where the two differ.
"""
