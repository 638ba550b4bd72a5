"""qcow2 read natively: the clusters go straight from the file to whoever asked.

Read in the order in which an image is opened and read:

    header.py      the header, its extensions and the snapshot table, with every limit
    mapping.py     guest range -> zero, data or compressed, through the layers of a backing chain
    audit.py       what --untrusted demands of a mapping
    source.py      the opening of backing chains and data files

Slices of tables are from source/tables.py, deflate and zstd from source/compressed.py, and the Source from
source/layers.py.

The rules are those of QEMU's docs/interop/qcow2.txt (`spec`) and of its driver where the two differ.
"""
