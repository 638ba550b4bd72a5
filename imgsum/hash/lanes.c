/*
 * sha256 of many equal blocks at once: the digests that hashlib makes, several blocks at a time on one core.
 *
 * One sha256 is a chain: each round waits for the one before it, and most of the core idles. The blocks of a checksum
 * don't depend on each other, so a kernel takes one block into each of its lanes and does the same round for all.
 *
 *   kernels    compress 64-byte chunks of several blocks: by vectors (any width), by x86's or ARMv8's sha256 instructions
 *   variants   a CPU feature, and its kernels, widest first
 *   hashing    blocks -> groups of data blocks -> kernels; zero blocks are set aside on the way
 *   Python     sha256_blocks() and variants(), in the limited API; left out with -DNO_PYTHON, for the tests' harness
 *
 * sha256: FIPS 180-4. Needs GCC or Clang. A machine that is neither x86-64 nor aarch64 has no variants.
 */

#ifndef LANES /* this file includes itself, below, once for each width of vectors */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define MAX_LANES 16
#define CHUNK 64
#define DIGEST 32

#define INLINE static inline __attribute__((always_inline))
#ifdef PORTABLE /* for tests: every width of vectors on every CPU, slowly */
#define TARGET(features)
#else
#define TARGET(features) __attribute__((target(features)))
#endif

typedef uint32_t State[8];

static const State INITIAL = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
};

static const uint32_t K[64] __attribute__((aligned(16))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

INLINE uint32_t load_big_endian(const uint8_t *from)
{
    uint32_t word;
    memcpy(&word, from, 4);
    return __builtin_bswap32(word);
}

INLINE void store_big_endian(uint8_t *to, uint32_t word)
{
    word = __builtin_bswap32(word);
    memcpy(to, &word, 4);
}

/* --- kernels ---------------------------------------------------------------------------------------------------- */

/* Takes `chunks` chunks of 64 bytes from each of `data` into the state of the same number. */
typedef void Compress(State *states, const uint8_t *const *data, size_t chunks);

#if defined(__x86_64__)

#include <immintrin.h>

/* The widths of vectors. 1 is plain C, for a block that is left over. */
#define LANES 1
#define FEATURES "sse2"
#include "lanes.c"
#define LANES 4
#define FEATURES "sse4.1"
#include "lanes.c"
#define LANES 8
#define FEATURES "avx2"
#include "lanes.c"
#define LANES 16
#define FEATURES "avx512f,avx512bw"
#include "lanes.c"

#ifndef PORTABLE

/* x86's instructions keep the state as two vectors, with a and c in the highest words: a b e f, and c d g h. */
INLINE TARGET("sha,sse4.1") void compress_sha_ni(State *states, const uint8_t *const *data, size_t chunks, const int n)
{
    const __m128i big_endian = _mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3);
    __m128i abef[4], cdgh[4], w[4][4];

    for (int lane = 0; lane < n; lane++) {
        __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)&states[lane][0]), 0xb1);
        __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)&states[lane][4]), 0x1b);
        abef[lane] = _mm_alignr_epi8(cdab, efgh, 8);
        cdgh[lane] = _mm_blend_epi16(efgh, cdab, 0xf0);
    }
    for (size_t at = 0; at < chunks * CHUNK; at += CHUNK) {
        __m128i abef_before[4], cdgh_before[4];
        for (int lane = 0; lane < n; lane++) {
            abef_before[lane] = abef[lane];
            cdgh_before[lane] = cdgh[lane];
        }
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) { /* four rounds each */
#pragma GCC unroll 4
            for (int lane = 0; lane < n; lane++) {
                __m128i *m = w[lane], k;
                if (i < 4)
                    m[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(data[lane] + at + 16 * i)), big_endian);
                else
                    m[i % 4] = _mm_sha256msg2_epu32(
                        _mm_add_epi32(_mm_sha256msg1_epu32(m[i % 4], m[(i + 1) % 4]),
                                      _mm_alignr_epi8(m[(i + 3) % 4], m[(i + 2) % 4], 4)),
                        m[(i + 3) % 4]);
                k = _mm_add_epi32(m[i % 4], _mm_load_si128((const __m128i *)&K[4 * i]));
                cdgh[lane] = _mm_sha256rnds2_epu32(cdgh[lane], abef[lane], k);
                abef[lane] = _mm_sha256rnds2_epu32(abef[lane], cdgh[lane], _mm_shuffle_epi32(k, 0x0e));
            }
        }
        for (int lane = 0; lane < n; lane++) {
            abef[lane] = _mm_add_epi32(abef[lane], abef_before[lane]);
            cdgh[lane] = _mm_add_epi32(cdgh[lane], cdgh_before[lane]);
        }
    }
    for (int lane = 0; lane < n; lane++) {
        __m128i feba = _mm_shuffle_epi32(abef[lane], 0x1b);
        __m128i dchg = _mm_shuffle_epi32(cdgh[lane], 0xb1);
        _mm_storeu_si128((__m128i *)&states[lane][0], _mm_blend_epi16(feba, dchg, 0xf0));
        _mm_storeu_si128((__m128i *)&states[lane][4], _mm_alignr_epi8(dchg, feba, 8));
    }
}

TARGET("sha,sse4.1") static void sha_ni_1(State *states, const uint8_t *const *data, size_t chunks)
{
    compress_sha_ni(states, data, chunks, 1);
}

TARGET("sha,sse4.1") static void sha_ni_2(State *states, const uint8_t *const *data, size_t chunks)
{
    compress_sha_ni(states, data, chunks, 2);
}

TARGET("sha,sse4.1") static void sha_ni_4(State *states, const uint8_t *const *data, size_t chunks)
{
    compress_sha_ni(states, data, chunks, 4);
}

#endif /* PORTABLE */

#elif defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__

#include <arm_neon.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>

#ifdef __clang__
#define SHA2 "sha2"
#else
#define SHA2 "+crypto" /* where GCC's arm_neon.h has them */
#endif

INLINE TARGET(SHA2) void compress_armv8(State *states, const uint8_t *const *data, size_t chunks, const int n)
{
    uint32x4_t abcd[2], efgh[2], w[2][4];

    for (int lane = 0; lane < n; lane++) {
        abcd[lane] = vld1q_u32(&states[lane][0]);
        efgh[lane] = vld1q_u32(&states[lane][4]);
    }
    for (size_t at = 0; at < chunks * CHUNK; at += CHUNK) {
        uint32x4_t abcd_before[2], efgh_before[2];
        for (int lane = 0; lane < n; lane++) {
            abcd_before[lane] = abcd[lane];
            efgh_before[lane] = efgh[lane];
        }
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) { /* four rounds each */
#pragma GCC unroll 2
            for (int lane = 0; lane < n; lane++) {
                uint32x4_t *m = w[lane], k, abcd_now = abcd[lane];
                if (i < 4)
                    m[i] = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(data[lane] + at + 16 * i)));
                else
                    m[i % 4] = vsha256su1q_u32(vsha256su0q_u32(m[i % 4], m[(i + 1) % 4]), m[(i + 2) % 4],
                                               m[(i + 3) % 4]);
                k = vaddq_u32(m[i % 4], vld1q_u32(&K[4 * i]));
                abcd[lane] = vsha256hq_u32(abcd_now, efgh[lane], k);
                efgh[lane] = vsha256h2q_u32(efgh[lane], abcd_now, k);
            }
        }
        for (int lane = 0; lane < n; lane++) {
            abcd[lane] = vaddq_u32(abcd[lane], abcd_before[lane]);
            efgh[lane] = vaddq_u32(efgh[lane], efgh_before[lane]);
        }
    }
    for (int lane = 0; lane < n; lane++) {
        vst1q_u32(&states[lane][0], abcd[lane]);
        vst1q_u32(&states[lane][4], efgh[lane]);
    }
}

TARGET(SHA2) static void armv8_1(State *states, const uint8_t *const *data, size_t chunks)
{
    compress_armv8(states, data, chunks, 1);
}

TARGET(SHA2) static void armv8_2(State *states, const uint8_t *const *data, size_t chunks)
{
    compress_armv8(states, data, chunks, 2);
}

#endif

/* --- variants --------------------------------------------------------------------------------------------------- */

typedef struct {
    int lanes;
    Compress *compress;
} Kernel;

typedef struct {
    const char *name;
    int (*available)(void); /* on this CPU and system */
    Kernel kernels[5];      /* widest first; the last has one lane */
} Variant;

#if defined(__x86_64__)

#ifdef PORTABLE

static int always(void) { return 1; }
#define has_sse41 always
#define has_avx2 always
#define has_avx512 always

#else

#include <cpuid.h>

static int has_sse41(void) { return __builtin_cpu_supports("sse4.1"); }
static int has_avx2(void) { return __builtin_cpu_supports("avx2"); }
static int has_avx512(void) { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw"); }
static int has_sha_ni(void) /* older compilers don't know its name */
{
    unsigned a, b, c, d;
    return has_sse41() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 29 & 1);
}

#endif

#elif defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__

static int has_sha2(void) { return (getauxval(AT_HWCAP) & HWCAP_SHA2) != 0; }

#endif

/* The fastest first. */
static const Variant VARIANTS[] = {
#if defined(__x86_64__)
#ifndef PORTABLE
    {"SHA-NI", has_sha_ni, {{4, sha_ni_4}, {2, sha_ni_2}, {1, sha_ni_1}}},
#endif
    {"AVX-512", has_avx512, {{16, vectors_16}, {8, vectors_8}, {4, vectors_4}, {1, vectors_1}}},
    {"AVX2", has_avx2, {{8, vectors_8}, {4, vectors_4}, {1, vectors_1}}},
    {"SSE4.1", has_sse41, {{4, vectors_4}, {1, vectors_1}}},
#elif defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    {"ARMv8", has_sha2, {{2, armv8_2}, {1, armv8_1}}},
#endif
    {NULL, NULL, {{0, NULL}}},
};

/* --- hashing ---------------------------------------------------------------------------------------------------- */

/* Blocks of one length that wait for each other, and where their digests go. */
typedef struct {
    const Kernel *kernels;
    size_t length;
    int count;
    const uint8_t *data[MAX_LANES];
    uint8_t *digests[MAX_LANES];
} Group;

/* Hash what is in the group, and empty it. */
static void flush(Group *group)
{
    const size_t rest = group->length % CHUNK, whole = group->length - rest;
    const size_t last_chunks = rest < CHUNK - 8 ? 1 : 2; /* the padding is a byte 0x80, zeros, and the length in bits */
    const Kernel *kernel = group->kernels;
    State states[MAX_LANES];
    uint8_t last[MAX_LANES][2 * CHUNK];
    const uint8_t *last_data[MAX_LANES];

    if (group->count == 0)
        return;
    while (kernel->lanes > group->count && kernel[1].lanes >= group->count)
        kernel++; /* the narrowest that takes all in one pass: a pass costs much the same, however wide */
    for (int lane = 0; lane < kernel->lanes; lane++) {
        if (lane >= group->count)
            group->data[lane] = group->data[0]; /* an idle lane does what the first one does */
        memcpy(states[lane], INITIAL, sizeof(State));
        memset(last[lane], 0, sizeof(last[lane]));
        memcpy(last[lane], group->data[lane] + whole, rest);
        last[lane][rest] = 0x80;
        store_big_endian(last[lane] + last_chunks * CHUNK - 8, (uint32_t)((uint64_t)group->length >> 29));
        store_big_endian(last[lane] + last_chunks * CHUNK - 4, (uint32_t)((uint64_t)group->length << 3));
        last_data[lane] = last[lane];
    }
    kernel->compress(states, group->data, whole / CHUNK);
    kernel->compress(states, last_data, last_chunks);
    for (int lane = 0; lane < group->count; lane++)
        for (int i = 0; i < 8; i++)
            store_big_endian(group->digests[lane] + 4 * i, states[lane][i]);
    group->count = 0;
}

/* Put a block into the group. */
static void add(Group *group, const uint8_t *block, uint8_t *digest)
{
    group->data[group->count] = block;
    group->digests[group->count] = digest;
    if (++group->count == group->kernels[0].lanes)
        flush(group);
}

static int is_zero(const uint8_t *block, size_t length)
{
    static const uint8_t zeros[16];
    if (length <= sizeof(zeros))
        return memcmp(block, zeros, length) == 0;
    return memcmp(block, zeros, sizeof(zeros)) == 0 && memcmp(block, block + 16, length - 16) == 0;
}

/*
 * Write the digests of the blocks of `data`, 32 bytes each. The last block may be shorter, and is hashed as it is.
 * A whole block of zeros is not hashed: its digest is `zero_digest`.
 */
static void hash_blocks(const Variant *variant, const uint8_t *data, size_t size, size_t block_size,
                        const uint8_t *zero_digest, uint8_t *digests)
{
    Group group = {.kernels = variant->kernels, .length = block_size};

    for (; size >= block_size; data += block_size, size -= block_size, digests += DIGEST) {
        if (is_zero(data, block_size))
            memcpy(digests, zero_digest, DIGEST);
        else
            add(&group, data, digests);
    }
    flush(&group);
    if (size) {
        group.length = size;
        add(&group, data, digests);
        flush(&group);
    }
}

/* --- Python ----------------------------------------------------------------------------------------------------- */

#ifndef NO_PYTHON

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* The variant called `name`, or NULL and an exception. */
static const Variant *find_variant(const char *name)
{
    for (const Variant *variant = VARIANTS; variant->name; variant++)
        if (strcmp(variant->name, name) == 0 && variant->available())
            return variant;
    PyErr_Format(PyExc_ValueError, "this CPU has no %s", name);
    return NULL;
}

PyDoc_STRVAR(sha256_blocks_doc,
             "sha256_blocks(data, block_size, zero_digest, digests, variant)\n--\n\n"
             "Write the sha256 of each block of DATA into DIGESTS, 32 bytes each, by the VARIANT of that name.\n\n"
             "block_size: bytes. The last block may be shorter. A whole block of zeros gets ZERO_DIGEST, unhashed.\n"
             "Without the GIL. Raises ValueError, and TypeError or BufferError for an unfit buffer.");

static PyObject *sha256_blocks(PyObject *module, PyObject *arguments)
{
    Py_buffer data, zero_digest, digests;
    Py_ssize_t block_size, blocks;
    const char *name;
    const Variant *variant;
    PyObject *result = NULL;

    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*ny*w*s:sha256_blocks", &data, &block_size, &zero_digest, &digests, &name))
        return NULL;
    if (block_size < 1) {
        PyErr_SetString(PyExc_ValueError, "block_size must be positive");
        goto done;
    }
    if (zero_digest.len != DIGEST) {
        PyErr_SetString(PyExc_ValueError, "zero_digest must be 32 bytes");
        goto done;
    }
    blocks = data.len / block_size + (data.len % block_size != 0);
    if (digests.len / DIGEST < blocks) {
        PyErr_Format(PyExc_ValueError, "digests has no room for %zd of 32 bytes", blocks);
        goto done;
    }
    variant = find_variant(name);
    if (!variant)
        goto done;
    Py_BEGIN_ALLOW_THREADS
    hash_blocks(variant, data.buf, (size_t)data.len, (size_t)block_size, zero_digest.buf, digests.buf);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    PyBuffer_Release(&data);
    PyBuffer_Release(&zero_digest);
    PyBuffer_Release(&digests);
    return result;
}

PyDoc_STRVAR(variants_doc, "variants()\n--\n\nWhat this CPU has, the fastest first: pairs of the name and the lanes.");

static PyObject *variants(PyObject *module, PyObject *none)
{
    PyObject *list = PyList_New(0);

    (void)module;
    (void)none;
    for (const Variant *variant = VARIANTS; list && variant->name; variant++) {
        PyObject *pair;
        if (!variant->available())
            continue;
        pair = Py_BuildValue("(si)", variant->name, variant->kernels[0].lanes);
        if (!pair || PyList_Append(list, pair) < 0)
            Py_CLEAR(list);
        Py_XDECREF(pair);
    }
    return list;
}

static PyMethodDef METHODS[] = {
    {"sha256_blocks", sha256_blocks, METH_VARARGS, sha256_blocks_doc},
    {"variants", variants, METH_NOARGS, variants_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot SLOTS[] = {
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED}, /* there is no state: importing this doesn't bring the GIL back */
#endif
    {0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_lanes",
    .m_doc = "sha256 of many equal blocks at once. See lanes.py.",
    .m_methods = METHODS,
    .m_slots = SLOTS,
};

PyMODINIT_FUNC PyInit__lanes(void)
{
    return PyModuleDef_Init(&MODULE);
}

#endif /* NO_PYTHON */

/* --- vectors of any width --------------------------------------------------------------------------------------- */

#else /* LANES: compress chunks of LANES blocks, one in each lane of vectors. The compiler knows the instructions. */

#define JOINED(a, b) a##_##b
#define WIDTH(a, b) JOINED(a, b)
#define V WIDTH(V, LANES)

typedef uint32_t V __attribute__((vector_size(4 * LANES)));

#define ROTATE(x, n) ((x) >> (n) | (x) << (32 - (n)))

TARGET(FEATURES) static void WIDTH(vectors, LANES)(State *states, const uint8_t *const *data, size_t chunks)
{
    V s[8], w[16];
    uint32_t words[LANES];

    for (int i = 0; i < 8; i++) {
        for (int lane = 0; lane < LANES; lane++)
            words[lane] = states[lane][i];
        memcpy(&s[i], words, sizeof(V));
    }
    for (size_t at = 0; at < chunks * CHUNK; at += CHUNK) {
        V a = s[0], b = s[1], c = s[2], d = s[3], e = s[4], f = s[5], g = s[6], h = s[7];
        for (int i = 0; i < 16; i++) {
            for (int lane = 0; lane < LANES; lane++)
                words[lane] = load_big_endian(data[lane] + at + 4 * i);
            memcpy(&w[i], words, sizeof(V));
        }
        for (int round = 0; round < 64; round += 16) {
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) {
                V t1, t2;
                if (round) {
                    V w1 = w[(i + 1) % 16], w14 = w[(i + 14) % 16];
                    w[i] += (ROTATE(w1, 7) ^ ROTATE(w1, 18) ^ w1 >> 3) + w[(i + 9) % 16] +
                            (ROTATE(w14, 17) ^ ROTATE(w14, 19) ^ w14 >> 10);
                }
                t1 = h + (ROTATE(e, 6) ^ ROTATE(e, 11) ^ ROTATE(e, 25)) + (g ^ (e & (f ^ g))) + K[round + i] + w[i];
                t2 = (ROTATE(a, 2) ^ ROTATE(a, 13) ^ ROTATE(a, 22)) + ((a & b) | (c & (a | b)));
                h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
            }
        }
        s[0] += a, s[1] += b, s[2] += c, s[3] += d, s[4] += e, s[5] += f, s[6] += g, s[7] += h;
    }
    for (int i = 0; i < 8; i++) {
        memcpy(words, &s[i], sizeof(V));
        for (int lane = 0; lane < LANES; lane++)
            states[lane][i] = words[lane];
    }
}

#undef ROTATE
#undef V
#undef WIDTH
#undef JOINED
#undef FEATURES
#undef LANES

#endif
