"""What other programs serve: a private qemu-nbd for the formats that only QEMU reads, or a [ COMMAND ]."""
