"""VMDK: VMware's virtual disks, as its Virtual Disk Format 5.0 and QEMU's block/vmdk.c have them."""
