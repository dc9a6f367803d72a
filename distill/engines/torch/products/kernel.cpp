// Products of few tokens with the stored weights of a GGUF file. kernel.py compiles this file for the processor.
//
// A weight lies in tiles of 16 rows. A pair of columns of a tile is one register of 32 bfloat16 numbers (word 2i + c:
// row i, column c of the pair). One instruction multiplies the register by the pair's two activations and adds the
// results to 16 fp32 sums, one for each row. The levels of 32 columns lie together: 16 pairs p, in
//   4 bits:  4 registers of 32 words; word w of register j holds pair 4j + t in its bits 4t to 4t + 3
//   5 bits:  the same, and 16 masks of 32 bits, the fifth bit of each word
//   6 bits:  the same, and 2 registers; word w of register j holds the upper bits of pair 8j + t in its bits 2t, 2t + 1
//   8 bits:  16 times 32 signed bytes
// Scales lie in other arrays, 16 rows together: a half precision number for 32 columns, or one for 256 columns times a
// byte for each group. Levels are exact in bfloat16 and sums are fp32, so that the file's values are not rounded.
#include <immintrin.h>
#include <math.h>
#include <stdint.h>

#include <algorithm>
#include <functional>
#include <vector>

#define INLINE inline __attribute__((always_inline))

struct Part {  // a weight [rows, columns]; mirrored in kernel.py
    int64_t kind, rows;
    const uint8_t *levels;
    const uint16_t *scale, *zero;        // half precision: of 256 columns where there are bytes, else of 32
    const uint8_t *scale_byte, *zero_byte;
    const uint16_t *bias;                // bfloat16, or null
};

namespace {

constexpr int ROWS = 16, WIDE = 8;  // rows of a tile; tokens that share a pass
constexpr int AHEAD = 5120;         // distance in bytes at which levels are prefetched

INLINE __m512 dot(__m512 sum, __m512i weights, __m512i x) {
#ifdef __AVX512BF16__
    return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)x);
#else
    const __m512i upper = _mm512_set1_epi32(0xffff0000);
    sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(weights, 16)),
                          _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), sum);
    return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(weights, upper)),
                           _mm512_castsi512_ps(_mm512_and_si512(x, upper)), sum);
#endif
}

inline __m512 half(const uint16_t *at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at)); }

inline uint16_t bfloat16(float value) {
    union { float number; uint32_t bits; } it = {value};
    if (value != value) return 0x7fc0;
    return (uint16_t)((it.bits + 0x7fff + ((it.bits >> 16) & 1)) >> 16);
}

inline float widened(uint16_t value) {
    union { uint32_t bits; float number; } it = {(uint32_t)value << 16};
    return it.number;
}

INLINE __m512 wide(__m256i bfloat16s) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bfloat16s), 16)); }

INLINE __m512 wide(const uint16_t *at) { return wide(_mm256_loadu_si256((const __m256i *)at)); }

INLINE __m256i narrow(__m512 values) {  // to the nearest bfloat16, ties to even
#ifdef __AVX512BF16__
    return (__m256i)_mm512_cvtneps_pbh(values);
#else
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 none = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);  // NaN stays NaN
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(up, none, _mm512_set1_epi32(0x7fc00000)), 16));
#endif
}

INLINE void store(uint16_t *at, __m512 values) { _mm256_storeu_si256((__m256i *)at, narrow(values)); }

// The bfloat16 numbers of levels 0 to 31 less `centre`, from level `first` on.
inline __m512i table(int first, int centre) {
    alignas(64) uint16_t numbers[32];
    for (int level = 0; level < 32; ++level) numbers[level] = bfloat16((float)(first + level - centre));
    return _mm512_load_si512(numbers);
}

template <int BITS> struct Levels {
    static constexpr int bytes = BITS == 8 ? 512 : 256 + (BITS == 5 ? 64 : BITS == 6 ? 128 : 0);  // of 32 columns
    __m512i low, high;
    explicit Levels(int centre) {
        low = table(0, centre);
        if (BITS == 4) low = _mm512_inserti64x4(low, _mm512_castsi512_si256(low), 1);  // bit 4 of an index belongs to another level
        high = table(32, centre);
    }
    template <int P> INLINE __m512i pair(const uint8_t *at) const {
        if constexpr (BITS == 8) {
            const __m512i a = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(at + 32 * P)));
            const __m512i b = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(at + 32 * P + 16)));
#ifdef __AVX512BF16__
            return (__m512i)_mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(b), _mm512_cvtepi32_ps(a));
#else
            const __m256i c = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(a)), 16));
            const __m256i d = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(b)), 16));
            return _mm512_inserti64x4(_mm512_castsi256_si512(c), d, 1);
#endif
        } else {
            __m512i index = _mm512_srli_epi16(_mm512_loadu_si512(at + 64 * (P / 4)), 4 * (P % 4));
            if constexpr (BITS == 4) return _mm512_permutexvar_epi16(index, low);
            if constexpr (BITS == 5) {
                const __mmask32 fifth = *(const uint32_t *)(at + 256 + 4 * P);
                index = _mm512_and_si512(index, _mm512_set1_epi16(15));
                index = _mm512_mask_add_epi16(index, fifth, index, _mm512_set1_epi16(16));
                return _mm512_permutexvar_epi16(index, low);
            }
            const __m512i two = _mm512_loadu_si512(at + 256 + 64 * (P / 8));
            constexpr int f = P % 8;
            const __m512i upper = f < 2 ? _mm512_slli_epi16(two, f < 2 ? 4 - 2 * f : 0)
                                        : _mm512_srli_epi16(two, f < 2 ? 0 : 2 * f - 4);
            index = _mm512_ternarylogic_epi32(_mm512_set1_epi16(15), index, upper, 0xca);  // lower 4 bits of the first
            return _mm512_permutex2var_epi16(low, index, high);
        }
    }
};

template <int BITS, int M, int CHAINS, int P, int END>
INLINE void pairs(const Levels<BITS> &of, const uint8_t *at, const int32_t *x, __m512 (&sums)[M][CHAINS]) {
    if constexpr (P < END) {
        const __m512i weights = of.template pair<P>(at);
        for (int m = 0; m < M; ++m)
            sums[m][P % CHAINS] = dot(sums[m][P % CHAINS], weights, _mm512_set1_epi32(x[P * M + m]));
        pairs<BITS, M, CHAINS, P + 1, END>(of, at, x, sums);
    }
}

// BITS of a level; GROUP columns share a scale; BYTES: scales are a half for 256 columns times a byte; SIGNED bytes;
// ZERO: a zero is added to each level times its scale.
template <int BITS, int GROUP, bool BYTES, bool SIGNED, bool ZERO, int M>
void tile(const Part &part, int64_t number, const Levels<BITS> &of, const int32_t *x, const float *totals,
          int64_t columns, __m512 (&out)[WIDE]) {
    constexpr int CHAINS = M == 1 ? 4 : M <= 8 ? 2 : 1;  // sums that do not wait for each other
    const int64_t groups = columns / 32, halves = BYTES ? columns / 256 : groups, bytes = columns / GROUP;
    const uint8_t *levels = part.levels + number * groups * Levels<BITS>::bytes;
    const uint16_t *scales = part.scale + number * halves * ROWS, *zeros = part.zero + number * halves * ROWS;
    const uint8_t *scale_bytes = part.scale_byte + number * bytes * ROWS;
    const uint8_t *zero_bytes = part.zero_byte + number * bytes * ROWS;
    __m512 sums[M], scale = _mm512_setzero_ps(), zero = scale;
    for (int m = 0; m < M; ++m) sums[m] = _mm512_setzero_ps();
    const auto byte = [](const uint8_t *at) {
        const __m128i sixteen = _mm_loadu_si128((const __m128i *)at);
        return _mm512_cvtepi32_ps(SIGNED ? _mm512_cvtepi8_epi32(sixteen) : _mm512_cvtepu8_epi32(sixteen));
    };
    const auto add = [&](const __m512(&own)[M][CHAINS], __m512 by) {
        for (int m = 0; m < M; ++m) {
            __m512 sum = own[m][0];
            for (int c = 1; c < CHAINS; ++c) sum = _mm512_add_ps(sum, own[m][c]);
            sums[m] = _mm512_fmadd_ps(by, sum, sums[m]);
        }
    };
    for (int64_t g = 0; g < groups; ++g) {
        if (!BYTES || g % 8 == 0) {
            scale = half(scales + (BYTES ? g / 8 : g) * ROWS);
            if (ZERO) zero = half(zeros + (BYTES ? g / 8 : g) * ROWS);
        }
        for (int line = 0; line < Levels<BITS>::bytes; line += 64)
            _mm_prefetch((const char *)levels + AHEAD + line, _MM_HINT_T0);
        __m512 own[M][CHAINS];
        const auto clear = [&] {
            for (int m = 0; m < M; ++m)
                for (int c = 0; c < CHAINS; ++c) own[m][c] = _mm512_setzero_ps();
        };
        clear();
        if (GROUP == 16) {
            pairs<BITS, M, CHAINS, 0, 8>(of, levels, x, own);
            add(own, _mm512_mul_ps(scale, byte(scale_bytes + 2 * g * ROWS)));
            clear();
            pairs<BITS, M, CHAINS, 8, 16>(of, levels, x, own);
            add(own, _mm512_mul_ps(scale, byte(scale_bytes + (2 * g + 1) * ROWS)));
        } else {
            pairs<BITS, M, CHAINS, 0, 16>(of, levels, x, own);
            add(own, BYTES ? _mm512_mul_ps(scale, byte(scale_bytes + g * ROWS)) : scale);
            if (ZERO) {
                const __m512 less = BYTES ? _mm512_mul_ps(zero, byte(zero_bytes + g * ROWS)) : zero;
                for (int m = 0; m < M; ++m)
                    sums[m] = _mm512_fmadd_ps(less, _mm512_set1_ps(totals[m]), sums[m]);
            }
        }
        levels += Levels<BITS>::bytes, x += 16 * M, totals += M;
    }
    for (int m = 0; m < M; ++m) out[m] = sums[m];
}

template <int BITS, int GROUP, bool BYTES, bool SIGNED, bool ZERO>
void all_tokens(const Part &part, int64_t number, int centre, const int32_t *x, const float *totals, int64_t columns,
                int64_t tokens, uint16_t *out, const uint16_t *other, int64_t stride) {
    const Levels<BITS> of(centre);
    const int64_t rows = part.rows - number * ROWS;
    const __mmask16 some = (__mmask16)(rows < ROWS ? (1 << rows) - 1 : 0xffff);
    for (int64_t first = 0; first < tokens; first += WIDE) {
        __m512 sums[WIDE];
        const int count = tokens - first < WIDE ? (int)(tokens - first) : WIDE;
        const int32_t *these = x + first * (columns / 2);
        const float *own = totals + first * (columns / 32);
#define CASE(M) case M: tile<BITS, GROUP, BYTES, SIGNED, ZERO, M>(part, number, of, these, own, columns, sums); break;
        switch (count) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
#undef CASE
        for (int m = 0; m < count; ++m) {
            const int64_t place = (first + m) * stride + number * ROWS;
            __m512 sum = sums[m];
            if (part.bias) sum = _mm512_add_ps(sum, wide(_mm256_maskz_loadu_epi16(some, part.bias + number * ROWS)));
            if (other) sum = _mm512_add_ps(sum, wide(_mm256_maskz_loadu_epi16(some, other + place)));
            _mm256_mask_storeu_epi16(out + place, some, narrow(sum));
        }
    }
}

INLINE __m512 exponential(__m512 x) {  // e^x within 2e-7 of it, of x from -87 to 88
    x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-87)), _mm512_set1_ps(88));
    const __m512 power = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    const __m512 rest = _mm512_fnmadd_ps(power, _mm512_set1_ps(-2.12194440e-4f),
                                         _mm512_fnmadd_ps(power, _mm512_set1_ps(0.693359375f), x));
    __m512 sum = _mm512_set1_ps(1 / 720.f);  // Taylor's series, whose next term is 6e-7 of the least rest at most
    constexpr float factors[] = {1 / 120.f, 1 / 24.f, 1 / 6.f, .5f, 1.f, 1.f};
    for (const float factor : factors) sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(factor));
    return _mm512_scalef_ps(sum, power);
}

// The sums of four registers.
INLINE __m128 sums_of(const __m512 (&four)[4]) {
    __m256 half[4];
    for (int i = 0; i < 4; ++i)
        half[i] = _mm256_add_ps(_mm512_castps512_ps256(four[i]), _mm512_extractf32x8_ps(four[i], 1));
    const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
    return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}

constexpr int WIDEST = 256, TOGETHER = 3;  // numbers of a head; heads that read a value while it is in registers

// Writes the shares of `shown` keys [shown, width] for a head's query as bfloat16 over `scores` (shown + 16 floats). A
// share is e to the power of the score less the largest score. Returns the sum of the shares.
float shares_of(const uint16_t *query, const uint16_t *keys, const uint16_t *mask, int64_t shown, int64_t width,
                float scaling, float *scores) {
    __m512i own[WIDEST / 32];
    for (int64_t part = 0; part < width / 32; ++part) own[part] = _mm512_loadu_si512(query + 32 * part);
    for (int64_t slot = 0; slot < shown; slot += 4) {
        __m512 four[4];
        for (int64_t i = 0; i < 4; ++i) {
            const uint16_t *key = keys + (slot + i < shown ? slot + i : shown - 1) * width;
            four[i] = _mm512_setzero_ps();
            for (int64_t part = 0; part < width / 32; ++part)
                four[i] = dot(four[i], own[part], _mm512_loadu_si512(key + 32 * part));
        }
        _mm_storeu_ps(scores + slot, sums_of(four));
    }
    const auto some = [&](int64_t slot) { return (__mmask16)(shown - slot >= 16 ? 0xffff : (1 << (shown - slot)) - 1); };
    __m512 largest = _mm512_set1_ps(-3.4e38f), total = _mm512_setzero_ps();
    for (int64_t slot = 0; slot < shown; slot += 16) {
        const __m512 added = wide(_mm256_maskz_loadu_epi16(some(slot), mask + slot));
        const __m512 score = _mm512_fmadd_ps(_mm512_loadu_ps(scores + slot), _mm512_set1_ps(scaling), added);
        _mm512_storeu_ps(scores + slot, score);
        largest = _mm512_mask_max_ps(largest, some(slot), largest, score);
    }
    largest = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
    for (int64_t slot = 0; slot < shown; slot += 16) {  // Shares are written before the scores that are still to be read.
        const __m512 score = _mm512_sub_ps(_mm512_loadu_ps(scores + slot), largest);
        const __m256i share = narrow(_mm512_maskz_mov_ps(some(slot), exponential(score)));
        _mm256_storeu_si256((__m256i *)((uint16_t *)scores + slot), share);
        total = _mm512_add_ps(total, wide(share));
    }
    return _mm512_reduce_add_ps(total);
}

// Writes out [COUNT, width]: the values [shown, width] weighed by the shares of COUNT heads, `apart` floats apart.
template <int COUNT>
void read_values(const float *scores, const float *totals, const uint16_t *values, int64_t shown, int64_t width,
                 int64_t apart, uint16_t *out) {
    alignas(64) static const uint16_t zeros[WIDEST] = {};
    const __m512i low = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i high = _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
    for (int64_t first = 0; first < width; first += 128) {  // numbers whose sums fit into registers
        const int64_t parts = width - first < 128 ? (width - first) / 32 : 4;
        __m512 sums[COUNT][4][2];
        for (int h = 0; h < COUNT; ++h)
            for (int p = 0; p < 4; ++p) sums[h][p][0] = sums[h][p][1] = _mm512_setzero_ps();
        const auto add = [&](int64_t slot, int64_t of) {
            const uint16_t *one = values + slot * width + first, *two = slot + 1 < shown ? one + width : zeros;
            for (int p = 0; p < of; ++p) {
                const __m512i a = _mm512_loadu_si512(one + 32 * p), b = _mm512_loadu_si512(two + 32 * p);
                const __m512i even = _mm512_unpacklo_epi16(a, b), odd = _mm512_unpackhi_epi16(a, b);
                for (int h = 0; h < COUNT; ++h) {
                    const __m512i share = _mm512_set1_epi32(((const int32_t *)(scores + h * apart))[slot / 2]);
                    sums[h][p][0] = dot(sums[h][p][0], even, share);
                    sums[h][p][1] = dot(sums[h][p][1], odd, share);
                }
            }
        };
        if (parts == 4) for (int64_t slot = 0; slot < shown; slot += 2) add(slot, 4);
        else for (int64_t slot = 0; slot < shown; slot += 2) add(slot, parts);
        for (int h = 0; h < COUNT; ++h)
            for (int p = 0; p < parts; ++p) {
                const __m512 total = _mm512_set1_ps(totals[h]);
                uint16_t *to = out + h * width + first + 32 * p;
                store(to, _mm512_div_ps(_mm512_permutex2var_ps(sums[h][p][0], low, sums[h][p][1]), total));
                store(to + 16, _mm512_div_ps(_mm512_permutex2var_ps(sums[h][p][0], high, sums[h][p][1]), total));
            }
    }
}

// Computes the attention of `count` heads that share keys: queries and out [count, width], scores [count, apart].
void attend(const uint16_t *queries, const uint16_t *keys, const uint16_t *values, const uint16_t *mask, int64_t count,
            int64_t shown, int64_t width, float scaling, float *scores, int64_t apart, uint16_t *out) {
    for (int64_t head = 0; head < count; head += TOGETHER) {
        const int64_t some = count - head < TOGETHER ? count - head : TOGETHER;
        float totals[TOGETHER], *own = scores + head * apart;
        for (int64_t h = 0; h < some; ++h)
            totals[h] = shares_of(queries + (head + h) * width, keys, mask, shown, width, scaling, own + h * apart);
        uint16_t *to = out + head * width;
        if (some == 1) read_values<1>(own, totals, values, shown, width, apart, to);
        if (some == 2) read_values<2>(own, totals, values, shown, width, apart, to);
        if (some == 3) read_values<3>(own, totals, values, shown, width, apart, to);
    }
}

// Norms a head [width] if `norm` is given, and rotates it: each number times its cosine plus the number of the other
// half times its sine.
void turn(uint16_t *head, const uint16_t *cosines, const uint16_t *sines, const float *norm, int64_t width, float epsilon) {
    alignas(64) uint16_t from[WIDEST];
    for (int64_t c = 0; c < width; ++c) from[c] = head[c];
    if (norm) {
        float squares = 0;
        for (int64_t c = 0; c < width; ++c) squares += widened(from[c]) * widened(from[c]);
        const float scale = 1 / sqrtf(squares / width + epsilon);
        for (int64_t c = 0; c < width; ++c) from[c] = bfloat16(widened(from[c]) * scale * norm[c]);
    }
    for (int64_t c = 0; c < width; c += 16)
        store(head + c, _mm512_fmadd_ps(wide(from + c), wide(cosines + c),
                                        _mm512_mul_ps(wide(from + (c + width / 2) % width), wide(sines + c))));
}

}  // namespace

extern "C" {

// out [tokens, stride] = x [tokens, columns] · weightᵀ + bias + other, with the rows of all parts one after another.
// `other` may be null. If `norm` [columns] is given, x is first divided by its root mean square and multiplied by
// `norm`. `room` holds tokens · columns · 33 / 32 numbers of 32 bits.
void distill_products(const Part *parts, int64_t count, int64_t tokens, int64_t columns, int64_t stride,
                      int64_t threads, const uint16_t *x, int32_t *room, uint16_t *out, const uint16_t *other,
                      const float *norm, double epsilon) {
    int64_t tiles = 0;
    for (int64_t i = 0; i < count; ++i) tiles += (parts[i].rows + ROWS - 1) / ROWS;
    const int64_t groups = columns / 32;
    float *totals = (float *)(room + tokens * columns / 2);
    if (norm) {
        uint16_t *to = (uint16_t *)(room + tokens * columns * 17 / 32);
#pragma omp parallel for num_threads(threads) schedule(static) if (tokens > WIDE)
        for (int64_t token = 0; token < tokens; ++token) {
            const uint16_t *from = x + token * columns;
            __m512 squares = _mm512_setzero_ps();
            for (int64_t c = 0; c < columns; c += 32)
                squares = dot(squares, _mm512_loadu_si512(from + c), _mm512_loadu_si512(from + c));
            const float scale = 1 / sqrtf(_mm512_reduce_add_ps(squares) / columns + (float)epsilon);
            for (int64_t c = 0; c < columns; c += 16)
                store(to + token * columns + c,
                      _mm512_mul_ps(_mm512_mul_ps(wide(from + c), _mm512_set1_ps(scale)), _mm512_loadu_ps(norm + c)));
        }
        x = to;
    }
    const auto prepare = [&](int64_t first, int64_t g) {  // orders a pass's pairs of a group by token, and sums them
        const int64_t some = tokens - first < WIDE ? tokens - first : WIDE;
        for (int64_t m = 0; m < some; ++m) {
            const int32_t *from = (const int32_t *)(x + (first + m) * columns) + 16 * g;
            int32_t *to = room + first * columns / 2 + 16 * g * some + m;
            for (int p = 0; p < 16; ++p) to[p * some] = from[p];
            const __m512 total = dot(_mm512_setzero_ps(), _mm512_set1_epi16(0x3f80), _mm512_loadu_si512(from));
            totals[first * groups + g * some + m] = _mm512_reduce_add_ps(total);
        }
    };
    const int64_t passes = (tokens + WIDE - 1) / WIDE, chunk = tiles / (8 * threads) + 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (passes > 1)  // Starting threads for one pass takes longer.
    for (int64_t all = 0; all < passes * groups; ++all) prepare(all / groups * WIDE, all % groups);
#pragma omp parallel for num_threads(threads) schedule(dynamic, chunk)
    for (int64_t all = 0; all < tiles; ++all) {
        int64_t number = all, i = 0;
        uint16_t *at = out;
        for (; number >= (parts[i].rows + ROWS - 1) / ROWS; ++i) {
            number -= (parts[i].rows + ROWS - 1) / ROWS;
            at += parts[i].rows;
        }
#define KIND(N, BITS, GROUP, BYTES, SIGNED, ZERO, CENTRE)                                                             \
    case N:                                                                                                           \
        all_tokens<BITS, GROUP, BYTES, SIGNED, ZERO>(parts[i], number, CENTRE, room, totals, columns, tokens, at,   \
                                                     other ? other + (at - out) : nullptr, stride);                 \
        break;
        switch (parts[i].kind) {
            KIND(0, 4, 32, false, false, false, 8)   // Q4_0
            KIND(1, 4, 32, false, false, true, 0)    // Q4_1
            KIND(2, 5, 32, false, false, false, 16)  // Q5_0
            KIND(3, 5, 32, false, false, true, 0)    // Q5_1
            KIND(4, 8, 32, false, false, false, 0)   // Q8_0
            KIND(5, 4, 32, true, false, true, 0)     // Q4_K
            KIND(6, 5, 32, true, false, true, 0)     // Q5_K
            KIND(7, 6, 16, true, true, false, 32)    // Q6_K
        }
#undef KIND
    }
}

struct Layer {  // mirrored in kernel.py; of q, k and v; of o; of gate and up; of down
    const Part *parts[4];
    int64_t counts[4];
    const float *norm, *mlp_norm, *query_norm, *key_norm;  // before attention and MLP [hidden]; of heads, or null
    uint16_t *keys, *values;                               // [batch, pairs, slots, width]
};

struct Step {  // mirrored in kernel.py
    int64_t layers, batch, columns, hidden, inner, pairs, groups, width, slots, shown, threads;
    double epsilon, scaling;
};

// Passes hidden states x [batch, columns, hidden] through decoder layers with silu: attention over a cache, whose slots
// `at` [batch, columns] take the keys and values, and a gated MLP. Cosines and sines (negative in the first half) are
// [batch, columns, width]. `mask` [batch, columns, shown] is added to scores. `room`, `states` and `scores` are buffers.
void distill_step(const Layer *layers, const Step *step, uint16_t *x, const uint16_t *cosines, const uint16_t *sines,
                  const int64_t *at, const uint16_t *mask, int32_t *room, uint16_t *states, float *scores) {
    const int64_t tokens = step->batch * step->columns, width = step->width, pairs = step->pairs;
    const int64_t heads = pairs * step->groups, stride = (heads + 2 * pairs) * width, inner = step->inner;
    uint16_t *read = states + tokens * (stride > 2 * inner ? stride : 2 * inner);  // results of the heads, then the MLP's inner numbers
    for (int64_t number = 0; number < step->layers; ++number) {
        const Layer &layer = layers[number];
        const auto product = [&](int which, int64_t from, int64_t to, const uint16_t *of, uint16_t *out,
                                 const uint16_t *other, const float *norm) {
            distill_products(layer.parts[which], layer.counts[which], tokens, from, to, step->threads, of, room, out,
                             other, norm, step->epsilon);
        };
        product(0, step->hidden, stride, x, states, nullptr, layer.norm);
        for (int64_t token = 0; token < tokens; ++token) {
            uint16_t *own = states + token * stride;
            const int64_t row = token / step->columns;
            for (int64_t head = 0; head < heads + pairs; ++head)
                turn(own + head * width, cosines + token * width, sines + token * width,
                     head < heads ? layer.query_norm : layer.key_norm, width, (float)step->epsilon);
            for (int64_t pair = 0; pair < pairs; ++pair) {
                const int64_t place = ((row * pairs + pair) * step->slots + at[token]) * width;
                __builtin_memcpy(layer.keys + place, own + (heads + pair) * width, 2 * width);
                __builtin_memcpy(layer.values + place, own + (heads + pairs + pair) * width, 2 * width);
            }
        }
        // A unit is a token's heads that share keys. Units are split until every thread has a part.
        const int64_t units = tokens * pairs, wanted = (step->threads + units - 1) / units;
        const int64_t each = (step->groups + wanted - 1) / wanted, parts = (step->groups + each - 1) / each;
        const int64_t apart = step->shown + 16;
#pragma omp parallel for num_threads(step->threads) schedule(static)
        for (int64_t all = 0; all < units * parts; ++all) {
            const int64_t token = all / (pairs * parts), pair = all / parts % pairs, first = all % parts * each;
            const int64_t head = pair * step->groups + first, row = token / step->columns;
            const int64_t count = step->groups - first < each ? step->groups - first : each;
            const int64_t place = (row * pairs + pair) * step->slots * width, number = token * heads + head;
            attend(states + token * stride + head * width, layer.keys + place, layer.values + place,
                   mask + token * step->shown, count, step->shown, width, (float)step->scaling, scores + number * apart,
                   apart, read + number * width);
        }
        product(1, heads * width, step->hidden, read, x, x, nullptr);
        product(2, step->hidden, 2 * inner, x, states, nullptr, layer.mlp_norm);
#pragma omp parallel for num_threads(step->threads) schedule(static)
        for (int64_t all = 0; all < tokens * inner / 16; ++all) {
            const uint16_t *gate = states + all * 16 / inner * 2 * inner + all * 16 % inner;
            const __m512 z = wide(gate), one = _mm512_set1_ps(1);
            const __m512 silu = _mm512_div_ps(z, _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), z))));
            store(read + 16 * all, _mm512_mul_ps(silu, wide(gate + inner)));
        }
        product(3, inner, step->hidden, read, x, x, nullptr);
    }
}

// Writes out [tokens, rows]: for each token of x [tokens, columns], the products with the rows of a weight [rows, columns]
// whose `rough` products [tokens, rows] are the `count` largest (or a few more), and −inf elsewhere. All are bfloat16.
void distill_shortlist(const uint16_t *rough, const uint16_t *x, const uint16_t *weight, const uint16_t *bias, int64_t tokens,
                       int64_t rows, int64_t columns, int64_t count, int64_t threads, uint16_t *out) {
    struct Place { int64_t token, row; };
    constexpr int DEEP = 32;  // The `count`-th largest maximum of DEEP numbers is not above the `count`-th largest number.
    std::vector<std::vector<Place>> found(tokens);
    const auto ordered = [](__m512i values) {  // bfloat16 numbers as integers in the same order
        return _mm512_xor_si512(values, _mm512_and_si512(_mm512_srai_epi16(values, 15), _mm512_set1_epi16(0x7fff)));
    };
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (tokens > 1)
    for (int64_t token = 0; token < tokens; ++token) {
        const uint16_t *own = rough + token * rows;
        const auto load = [&](int64_t row) {  // rows after the last one are the smallest number
            const int64_t left = rows - row;
            const __mmask32 there = left >= 32 ? 0xffffffff : left > 0 ? (1u << left) - 1 : 0;
            return ordered(_mm512_mask_loadu_epi16(_mm512_set1_epi16(-1), there, own + row));
        };
        std::vector<int16_t> largest;
        for (int64_t row = 0; row < rows; row += 32 * DEEP) {
            __m512i best = load(row);
            for (int i = 1; i < DEEP; ++i) best = _mm512_max_epi16(best, load(row + 32 * i));
            largest.resize(largest.size() + 32);
            _mm512_storeu_si512(largest.data() + largest.size() - 32, best);
        }
        int16_t least = -32768;
        if ((int64_t)largest.size() > count) {
            std::nth_element(largest.begin(), largest.begin() + count - 1, largest.end(), std::greater<int16_t>());
            least = largest[count - 1];
        }
        for (int64_t row = 0; row < rows; row += 32) {
            __mmask32 in = _mm512_cmpge_epi16_mask(load(row), _mm512_set1_epi16(least));
            for (; in; in &= in - 1)
                if (row + __builtin_ctz(in) < rows) found[token].push_back({token, row + __builtin_ctz(in)});
        }
    }
    std::vector<Place> all;
    for (const auto &own : found) all.insert(all.end(), own.begin(), own.end());
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < tokens * rows; ++i) out[i] = 0xff80;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < (int64_t)all.size(); ++i) {
        const uint16_t *row = weight + all[i].row * columns, *own = x + all[i].token * columns;
        if (i + 4 < (int64_t)all.size())
            for (int64_t c = 0; c < columns; c += 32) _mm_prefetch((const char *)(weight + all[i + 4].row * columns + c), _MM_HINT_T0);
        __m512 total = _mm512_setzero_ps();
        for (int64_t c = 0; c < columns; c += 32) total = dot(total, _mm512_loadu_si512(row + c), _mm512_loadu_si512(own + c));
        const float shift = bias ? widened(bias[all[i].row]) : 0;
        out[all[i].token * rows + all[i].row] = bfloat16(_mm512_reduce_add_ps(total) + shift);
    }
}

// Packs levels [rows, columns], a byte each, as tiles. Rows that fill the last tile have level 0.
void distill_pack(int64_t bits, const uint8_t *levels, int64_t rows, int64_t columns, uint8_t *tiles, int64_t threads) {
    const int64_t groups = columns / 32, size = bits == 8 ? 512 : 256 + (bits == 5 ? 64 : bits == 6 ? 128 : 0);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t number = 0; number < (rows + ROWS - 1) / ROWS; ++number)
        for (int64_t g = 0; g < groups; ++g) {
            uint8_t *to = tiles + (number * groups + g) * size;
            for (int row = 0; row < ROWS && number * ROWS + row < rows; ++row) {
                const uint8_t *from = levels + (number * ROWS + row) * columns + 32 * g;
                for (int c = 0; c < 32; ++c) {
                    const int pair = c / 2, word = 2 * row + c % 2, level = from[c];
                    if (bits == 8) { to[32 * pair + word] = (uint8_t)level; continue; }
                    to[64 * (pair / 4) + 2 * word + pair % 4 / 2] |= (level & 15) << pair % 2 * 4;
                    if (bits == 5) to[256 + 4 * pair + word / 8] |= (level >> 4) << word % 8;
                    if (bits == 6) to[256 + 64 * (pair / 8) + 2 * word + pair % 8 / 4] |= (level >> 4) << pair % 4 * 2;
                }
            }
        }
}

}
