def sha256_blocks(
    data: bytes | bytearray | memoryview,
    block_size: int,
    zero_digest: bytes,
    digests: bytearray | memoryview,
    variant: str,
    /,
) -> None: ...
def variants() -> list[tuple[str, int]]: ...
