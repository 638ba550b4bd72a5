"""What imgsum costs, against its peers on the same images: `make bench`. See README.md beside this file."""
