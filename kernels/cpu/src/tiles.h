// The matrix unit of a CPU with AMX: eight tiles of 16 rows of 64 bytes, and products of two of them.
//
// A kernel takes `Tiles` (the instructions) or `EmulatedTiles` (what Intel's manual says that they do,
// in C++) as a template parameter: tests and sanitizers run the same kernel on machines without AMX.
// The instructions are written out, because the compilers' intrinsics take literal tile numbers only,
// and GCC's do not say that a load reads memory: it may be moved before the stores that it needs.
#pragma once

#include <cstdint>

#include "dispatch.h"

#if EC_X86 && (defined(__clang__) ? __clang_major__ >= 11 : __GNUC__ >= 11)
#define EC_TILES 1
#else
#define EC_TILES 0  // an assembler of that age may not know them
#endif

namespace ec {

// What ldtilecfg reads.
struct alignas(64) TileShapes {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t num_rows[16];
};

inline constexpr TileShapes whole_tiles = {
    1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

// Asks the kernel for the tiles' registers: they are given to a process that has asked, if at all.
bool obtain_tiles();

// A thread's tiles to their initial state, so that a switch of threads need not save 8 KiB: before a
// thread of the pool sleeps, and at the end of a captured pass.
void release_tiles();

#if EC_TILES
struct Tiles {
    // Every thread has registers of its own, and must load their shapes before it uses one.
    static void configure(const TileShapes& shapes) {
        if (current == &shapes) return;
        asm volatile("ldtilecfg %0" : : "m"(shapes));
        current = &shapes;
    }
    static void release() {
        if (current == nullptr) return;
        asm volatile("tilerelease");
        current = nullptr;
    }
    template <int TILE> static void zero() {
        asm volatile("tilezero %%tmm%c0" : : "i"(TILE));
    }
    // Rows `stride` bytes apart; 0 repeats one.
    template <int TILE> static void load(const void* from, int64_t stride) {
        const auto& read = *static_cast<const uint8_t (*)[]>(from);
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(TILE), "m"(read));
    }
    template <int TILE> static void store(void* to, int64_t stride) {
        auto& written = *static_cast<uint8_t (*)[]>(to);
        asm volatile("tilestored %%tmm%c3, (%1,%2,1)" : "=m"(written) : "r"(to), "r"(stride), "i"(TILE));
    }
    // SUM [m][n] += sum over k of X [m][k] times W [k][n]: pairs of bfloat16, ...
    template <int SUM, int X, int W> static void dot_bf16() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(X), "i"(W));
    }
    // ... fours of signed bytes, ...
    template <int SUM, int X, int W> static void dot_signed() {
        asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(X), "i"(W));
    }
    // ... or signed ones of X times unsigned ones of W, or the reverse.
    template <int SUM, int X, int W> static void dot_signed_unsigned() {
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(X), "i"(W));
    }
    template <int SUM, int X, int W> static void dot_unsigned_signed() {
        asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(X), "i"(W));
    }

    static thread_local const TileShapes* current;
};
#endif

// What would be an illegal instruction is one here: a tile used in a thread without shapes, a product
// of tiles whose shapes do not fit.
struct EmulatedTiles {
    enum class Product { bf16, signed_bytes, signed_unsigned, unsigned_signed };

    static void configure(const TileShapes& shapes);
    static void release();
    static void zero(int tile);
    static void load(int tile, const void* from, int64_t stride);
    static void store(int tile, void* to, int64_t stride);
    static void dot(Product product, int sum, int x, int w);

    template <int TILE> static void zero() { zero(TILE); }
    template <int TILE> static void load(const void* from, int64_t stride) { load(TILE, from, stride); }
    template <int TILE> static void store(void* to, int64_t stride) { store(TILE, to, stride); }
    template <int SUM, int X, int W> static void dot_bf16() { dot(Product::bf16, SUM, X, W); }
    template <int SUM, int X, int W> static void dot_signed() { dot(Product::signed_bytes, SUM, X, W); }
    template <int SUM, int X, int W> static void dot_signed_unsigned() {
        dot(Product::signed_unsigned, SUM, X, W);
    }
    template <int SUM, int X, int W> static void dot_unsigned_signed() {
        dot(Product::unsigned_signed, SUM, X, W);
    }
};

// run(Tiles{}) or run(EmulatedTiles{}), as the instruction set in use says.
template <typename Fn>
auto with_tiles(Fn&& run) {
#if EC_TILES
    if (isa() == Isa::amx) return run(Tiles{});
#endif
    return run(EmulatedTiles{});
}

}  // namespace ec
