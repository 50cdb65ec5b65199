// Dropout masks from a seed and a position, so that no mask is ever stored: Threefry4x32-12 (Salmon et al., Parallel random
// numbers: as easy as 1, 2, 3, SC11), with the fewest rounds that pass BigCrush.
//
// Block b has 64 entries, from 4 words of 32 bits in each of 8 lanes: always 8, so that masks do not depend on W.
//
//     words(seed, b)[lane] = threefry(key (seed low, seed high, 0, 0), counter (b low, b high, lane, 0))
//
// The 16 bits h (0 low, 1 high) of word w in lane l decide on entry 8 (2 w + h) + l: it is kept where they are, as a
// signed integer, dropped - 2^15 or more, which has probability 1 - dropped / 2^16.
#pragma once

#include "vectors.h"

typedef uint32_t Lanes __attribute__((vector_size(32)));
typedef int32_t SignedLanes __attribute__((vector_size(32)));

INLINE static inline void threefry(uint64_t seed, uint64_t block, Lanes word[4]) {
    const uint32_t low = (uint32_t)seed, high = (uint32_t)(seed >> 32);
    const uint32_t key[5] = {low, high, 0, 0, 0x1BD11BDAu ^ low ^ high};
    constexpr int rotations[8][2] = {{10, 26}, {11, 21}, {13, 27}, {23, 5}, {6, 20}, {17, 11}, {25, 10}, {18, 20}};
    // the first round: lanes do not differ yet in words 0 and 1, and words 2 and 3 become the lane
    uint32_t x0 = (uint32_t)block + low, x1 = (uint32_t)(block >> 32) + high;
    x0 += x1;
    x1 = (x1 << rotations[0][0] | x1 >> (32 - rotations[0][0])) ^ x0;
    word[0] = x0 - Lanes{}, word[1] = x1 - Lanes{};
    word[2] = word[3] = Lanes{0, 1, 2, 3, 4, 5, 6, 7};
#pragma GCC unroll 12
    for (int round = 1; round < 12; ++round) {
        const int a = round % 2 ? 3 : 1, b = 4 - a;  // the partners of words 0 and 2
        const int left = rotations[round % 8][0], right = rotations[round % 8][1];
        word[0] += word[a];
        word[2] += word[b];
        word[a] = (word[a] << left | word[a] >> (32 - left)) ^ word[0];
        word[b] = (word[b] << right | word[b] >> (32 - right)) ^ word[2];
        if (round % 4 == 3) {
            const int next = (round + 1) / 4;
            word[0] += key[next];
            word[1] += key[next + 1];
            word[2] += key[(next + 2) % 5];
            word[3] += key[(next + 3) % 5] + (uint32_t)next;
        }
    }
}

// The factors of the 64 entries of a block: `scale` where kept, 0 where dropped; factors[j][l] for entry j W + l.
// dropped < 2^16.
INLINE static inline void keep_factors(uint64_t seed, uint64_t block, uint32_t dropped, float scale,
                                       Vec factors[64 / W]) {
    Lanes word[4];
    threefry(seed, block, word);
    const SignedLanes least = (int32_t)((dropped << 16) ^ 0x80000000u) - SignedLanes{};
    int32_t bits;
    std::memcpy(&bits, &scale, sizeof bits);
#pragma GCC unroll 4
    for (int w = 0; w < 4; ++w) {
        const SignedLanes bits16[2] = {(SignedLanes)(word[w] << 16), (SignedLanes)word[w]};
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
            const SignedLanes factor = ~(bits16[h] < least) & bits;
            std::memcpy((char*)factors + (2 * w + h) * sizeof factor, &factor, sizeof factor);
        }
    }
}
