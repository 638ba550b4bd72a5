"""VHDX: Hyper-V's virtual disks, as Microsoft's [MS-VHDX] has them."""
