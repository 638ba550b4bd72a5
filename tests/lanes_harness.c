/*
 * lanes.c without Python, for CPUs that this machine isn't and for sanitizers.
 *
 *     lanes_harness BLOCK_SIZE OFFSET < content
 *
 * prints a line for each variant: its name, and the digests of the content's blocks. The content lies OFFSET bytes
 * after the start of an allocation that ends where it ends, so that a sanitizer sees the first byte too many. The zero digest is 32 bytes of 'z'.
 */

#define NO_PYTHON
#include "../imgsum/hash/lanes.c"

#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv)
{
    static uint8_t input[1 << 20];
    const size_t block_size = (size_t)atol(argv[argc - 2]), offset = (size_t)atol(argv[argc - 1]);
    const size_t size = fread(input, 1, sizeof(input), stdin), blocks = (size + block_size - 1) / block_size;
    uint8_t *allocated = malloc(offset + size), *digests = malloc(blocks * DIGEST), zero_digest[DIGEST];

    memset(zero_digest, 'z', DIGEST);
    memcpy(allocated + offset, input, size);
    for (const Variant *variant = VARIANTS; variant->name; variant++) {
        if (!variant->available())
            continue;
        hash_blocks(variant, allocated + offset, size, block_size, zero_digest, digests);
        printf("%s ", variant->name);
        for (size_t i = 0; i < blocks * DIGEST; i++)
            printf("%02x", digests[i]);
        printf("\n");
    }
    free(allocated);
    free(digests);
    return 0;
}
