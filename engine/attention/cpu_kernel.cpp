// Attention over an arena on a CPU, where keys and values lie: nothing is gathered first. One file with a C interface and
// no dependency but OpenMP, so that it builds in seconds; `cpu_path.py` builds and calls it.
//
// A work item is a tile of a sequence's query rows (query and head of a group packed: row = query * group + head), one key
// head and one segment of its keys. It walks the keys in tiles of 32: a tile's keys are transposed once for all rows,
// scores come 32 at a time without horizontal sums, the softmax is online, and values are read where they lie. Sums are
// float32. bfloat16 keys are multiplied in pairs where the CPU can. Few items are split along the keys into segments,
// whose parts a second pass joins.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>
#include <vector>
#include <omp.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

extern "C" {
// One call's worth, as `cpu_path.Call`. Strides count elements. Pointers may be null where the text says so.
struct Call {
    const void *q, *k, *v;             // [T, heads, dim], new tokens
    void *out;                         // [T, query_heads, dim]
    void *arena_k, *arena_v;           // this layer's [rows, kv_heads, dim]
    const float *sinks;                // [query_heads] or null
    const int32_t *starts, *ends;      // as in Layout
    const int64_t *writes;             // as in Layout
    const int64_t *bases;              // as in Layout, or null: then tables
    const int32_t *tables;
    int64_t table_stride, block_size;
    int64_t q_token, q_head, k_token, k_head, v_token, v_head;  // strides
    int64_t sequences, tokens, query_heads, kv_heads, dim;
    int64_t window;                    // 0: none
    int64_t longest_keys, threads, bfloat16;
    float scale, softcap;              // softcap 0: none
};
int kvbench_attend(const Call *call);
}

namespace {

constexpr int W = 16;       // floats a vector
constexpr int KEYS = 32;    // keys a tile
constexpr int ROWS = 64;    // query rows a tile
constexpr int DIM = 256;    // largest head
constexpr int SHORTEST = 256;  // keys a segment
constexpr float NONE = -std::numeric_limits<float>::infinity();

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));
typedef uint16_t bf16;

template <typename V> inline V load(const void *from) { V x; std::memcpy(&x, from, sizeof x); return x; }
template <typename V> inline void store(void *to, V x) { std::memcpy(to, &x, sizeof x); }
inline vf all(float x) { return x - vf{}; }
inline vf widened(vh x) { return (vf)(__builtin_convertvector(x, vu) << 16); }
inline vf load_floats(const float *from) { return load<vf>(from); }
inline vf load_floats(const bf16 *from) { return widened(load<vh>(from)); }
inline float as_float(float x) { return x; }
inline float as_float(bf16 x) { uint32_t bits = uint32_t(x) << 16; float y; std::memcpy(&y, &bits, 4); return y; }
inline void put(float *to, vf x) { store(to, x); }
inline void put(bf16 *to, vf x) {  // to nearest, ties to even; NaN stays NaN
    vu bits = (vu)x;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vu kept = x == x ? rounded : vu{} + 0x7fc0;
    store(to, __builtin_convertvector(kept, vh));
}

inline float largest(vf x) {
    float best = x[0];
    for (int i = 1; i < W; ++i) best = x[i] > best ? x[i] : best;
    return best;
}
inline float total(vf x) {
    float sum = 0;
    for (int step = W / 2; step; step /= 2) for (int i = 0; i < step; ++i) x[i] += x[i + step];
    sum = x[0];
    return sum;
}

// e^x to about one unit in the last place for x <= 0 and moderate x > 0; NaN stays NaN, -inf gives 0.
inline vf exponential(vf x) {
    vf low = all(-87.3f);
    vf clamped = x < low ? low : x;
    clamped = clamped > 88.f ? all(88.f) : clamped;
    vf shifted = clamped * 1.44269504088896341f + 12582912.f;  // nearest whole number in the low bits
    vf whole = shifted - 12582912.f;
    vf r = clamped - whole * 0.693359375f;
    r = r + whole * 2.12194440e-4f;
    vf p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.f;
    vf power = (vf)((((vi)shifted - 0x4b400000) + 127) << 23);
    vf y = p * power;
    return x < low ? vf{} : y;
}

inline vf tangent(vf x) {  // tanh
    vf size = x < 0.f ? -x : x;
    vf z = x * x;
    vf p = all(-5.70498872745e-3f);
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    vf near = p * z * x + x;
    vf capped = size > 20.f ? all(20.f) : size;
    vf far = 1.f - 2.f / (exponential(2.f * capped) + 1.f);
    far = x < 0.f ? -far : far;
    return size < 0.625f ? near : far;
}

// 16 x 16 of 32-bit units, rows to columns.
inline void transposed(vi (&x)[W]) {
    vi y[W];
    for (int i = 0; i < W; i += 2) {
        y[i] = __builtin_shufflevector(x[i], x[i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
        y[i + 1] = __builtin_shufflevector(x[i], x[i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    }
    for (int i = 0; i < W; i += 4) for (int j = i; j < i + 2; ++j) {
        x[j] = __builtin_shufflevector(y[j], y[j + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
        x[j + 2] = __builtin_shufflevector(y[j], y[j + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
    for (int i = 0; i < W; i += 8) for (int j = i; j < i + 4; ++j) {
        y[j] = __builtin_shufflevector(x[j], x[j + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
        y[j + 4] = __builtin_shufflevector(x[j], x[j + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    }
    for (int j = 0; j < 8; ++j) {
        x[j] = __builtin_shufflevector(y[j], y[j + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        x[j + 8] = __builtin_shufflevector(y[j], y[j + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
}

// How keys and queries of a number format are laid out for products. `unit` is what one 32-bit lane holds.
struct Singles {
    static constexpr int per_unit = 1;
    typedef float T;
    typedef float unit;
    static inline vf product(vf sum, unit q, vi keys) { return sum + q * (vf)keys; }
    static inline unit pack(const T *q, int i) { return q[i]; }
    static inline vi units(const T *from) { return load<vi>(from); }
};
#ifdef __AVX512BF16__
struct Pairs {
    static constexpr int per_unit = 2;
    typedef bf16 T;
    typedef int32_t unit;
    static inline vf product(vf sum, unit q, vi keys) {
        return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(q), (__m512bh)(__m512i)keys);
    }
    static inline unit pack(const T *q, int i) { unit x; std::memcpy(&x, q + 2 * i, 4); return x; }
    static inline vi units(const T *from) { return load<vi>(from); }
};
#else
struct Pairs {  // widened to single floats
    static constexpr int per_unit = 1;
    typedef bf16 T;
    typedef float unit;
    static inline vf product(vf sum, unit q, vi keys) { return sum + q * (vf)keys; }
    static inline unit pack(const T *q, int i) { return as_float(q[i]); }
    static inline vi units(const T *from) { return (vi)load_floats(from); }
};
#endif

template <typename F> struct alignas(64) Scratch {
    typename F::unit q[ROWS * DIM];
    int32_t keys[DIM * KEYS];             // [unit][key]
    float scores[ROWS * KEYS];
    float acc[ROWS * DIM];
    float top[ROWS], shrink[ROWS];
    vf sum[ROWS];
    typename F::T staged[KEYS][DIM];      // rows of a head that is no multiple of the vectors
    typename F::T row[DIM];               // zero behind the head, as `staged` is
    typename F::T out[DIM];
    typename F::T zeros[DIM];
};

template <typename F> Scratch<F> &scratch() {
    thread_local Scratch<F> *mine = nullptr;
    if (!mine) { mine = new Scratch<F>; std::memset((void *)mine, 0, sizeof *mine); }  // lives as long as its thread
    return *mine;
}

template <typename F, int R> inline void score_rows(const typename F::unit *q, int stride, const int32_t *keys, int many, bool more, float *scores) {
    vf sum[R][2];
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = vf{};
    for (int u = 0; u < many; ++u) {
        vi first = load<vi>(keys + u * KEYS), second = load<vi>(keys + u * KEYS + W);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            typename F::unit one = q[r * stride + u];
            sum[r][0] = F::product(sum[r][0], one, first);
            sum[r][1] = F::product(sum[r][1], one, second);
        }
    }
    for (int r = 0; r < R; ++r) for (int half = 0; half < 2; ++half) {
        float *to = scores + r * KEYS + half * W;
        store(to, more ? load<vf>(to) + sum[r][half] : sum[r][half]);
    }
}

// All rows against the tile's keys, in runs of so many units that short sums are summed: more exact than one long one.
template <typename F> void score(Scratch<F> &my, int rows, int units) {
    constexpr int RUN = 64;
    for (int u = 0; u < units; u += RUN) {
        const int many = std::min(RUN, units - u);
        const int32_t *keys = my.keys + u * KEYS;
        auto some = [&](auto count, int r) {
            score_rows<F, decltype(count)::value>(my.q + r * units + u, units, keys, many, u > 0, my.scores + r * KEYS);
        };
        int r = 0;
        for (; r + 8 <= rows; r += 8) some(std::integral_constant<int, 8>{}, r);
        for (; r + 4 <= rows; r += 4) some(std::integral_constant<int, 4>{}, r);
        switch (rows - r) {
            case 3: some(std::integral_constant<int, 3>{}, r); break;
            case 2: some(std::integral_constant<int, 2>{}, r); break;
            case 1: some(std::integral_constant<int, 1>{}, r); break;
            default: break;
        }
    }
}

template <typename T, int R, int N> inline void add_rows(const float *weights, const float *shrink, const T *const *rows, int keys, int offset, float *acc, int width) {
    vf sum[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sum[r][n] = load<vf>(acc + r * width + n * W) * shrink[r];
    for (int j = 0; j < keys; ++j) {
        vf value[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) value[n] = load_floats(rows[j] + offset + n * W);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            float weight = weights[r * KEYS + j];
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) sum[r][n] += weight * value[n];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) store(acc + r * width + n * W, sum[r][n]);
}

template <typename T, int N> void add_columns(const float *weights, const float *shrink, const T *const *rows, int keys, int offset, float *acc, int width, int many) {
    int r = 0;
    for (; r + 4 <= many; r += 4) add_rows<T, 4, N>(weights + r * KEYS, shrink + r, rows, keys, offset, acc + r * width, width);
    switch (many - r) {
        case 3: add_rows<T, 3, N>(weights + r * KEYS, shrink + r, rows, keys, offset, acc + r * width, width); break;
        case 2: add_rows<T, 2, N>(weights + r * KEYS, shrink + r, rows, keys, offset, acc + r * width, width); break;
        case 1: add_rows<T, 1, N>(weights + r * KEYS, shrink + r, rows, keys, offset, acc + r * width, width); break;
        default: break;
    }
}

template <typename T> void add_values(const float *weights, const float *shrink, const T *const *rows, int keys, float *acc, int width, int many) {
    int offset = 0;
    for (; offset + 4 * W <= width; offset += 4 * W) add_columns<T, 4>(weights, shrink, rows, keys, offset, acc + offset, width, many);
    switch ((width - offset) / W) {
        case 3: add_columns<T, 3>(weights, shrink, rows, keys, offset, acc + offset, width, many); break;
        case 2: add_columns<T, 2>(weights, shrink, rows, keys, offset, acc + offset, width, many); break;
        case 1: add_columns<T, 1>(weights, shrink, rows, keys, offset, acc + offset, width, many); break;
        default: break;
    }
}

struct Item { int64_t sequence, row, rows, first, last; };  // a tile of packed rows; the keys that any of them sees

struct Part { float *top, *sum, *acc; };

template <typename F, bool PAGED> struct Kernel {
    typedef typename F::T T;
    const Call &c;
    const int64_t group, dim, width, units, padded;

    explicit Kernel(const Call &call)
        : c(call), group(call.query_heads / call.kv_heads), dim(call.dim), width((dim + W - 1) / W * W),
          units((dim + W * F::per_unit - 1) / (W * F::per_unit) * W), padded(units * F::per_unit) {}

    // Offsets of the tile's keys in the arena; past the last one nothing is looked up.
    inline void locate(int64_t sequence, int64_t first, int keys, int64_t *offsets) const {
        const int64_t token = c.kv_heads * dim;
        if (!PAGED) {
            for (int j = 0; j < keys; ++j) offsets[j] = (c.bases[sequence] + first + j) * token;
            return;
        }
        const int32_t *table = c.tables + sequence * c.table_stride;
        int64_t number = first / c.block_size, within = first % c.block_size;
        for (int j = 0; j < keys; ++number, within = 0)
            for (; within < c.block_size && j < keys; ++within, ++j) offsets[j] = (table[number] * c.block_size + within) * token;
    }

    void write(int64_t token) const {
        const int64_t to = c.writes[token] * c.kv_heads * dim;
        for (int64_t head = 0; head < c.kv_heads; ++head) {
            std::memcpy((T *)c.arena_k + to + head * dim, (const T *)c.k + token * c.k_token + head * c.k_head, dim * sizeof(T));
            std::memcpy((T *)c.arena_v + to + head * dim, (const T *)c.v + token * c.v_token + head * c.v_head, dim * sizeof(T));
        }
    }

    void pack_queries(Scratch<F> &my, const Item &item, int64_t head) const {
        const T *q = (const T *)c.q;
        for (int64_t r = 0; r < item.rows; ++r) {
            const int64_t query = (item.row + r) / group, member = (item.row + r) % group;
            const T *from = q + (c.starts[item.sequence] + query) * c.q_token + (head * group + member) * c.q_head;
            if (dim != padded) { std::memcpy(my.row, from, dim * sizeof(T)); from = my.row; }
            for (int64_t u = 0; u < units; ++u) my.q[r * units + u] = F::pack(from, int(u));
        }
        std::memset(my.acc, 0, item.rows * width * sizeof(float));
        for (int64_t r = 0; r < item.rows; ++r) { my.top[r] = NONE; my.sum[r] = vf{}; }
    }

    void transpose_keys(Scratch<F> &my, const int64_t *offsets, int keys, int64_t head) const {
        const T *rows[KEYS];
        for (int j = 0; j < KEYS; ++j) {
            const T *from = j < keys ? (const T *)c.arena_k + offsets[j] + head * dim : my.zeros;
            if (dim != padded && j < keys) { std::memcpy(my.staged[j], from, dim * sizeof(T)); from = my.staged[j]; }
            rows[j] = from;
        }
        for (int half = 0; half < KEYS; half += W) {
            if (half >= keys) {
                for (int64_t u = 0; u < units; ++u) store(my.keys + u * KEYS + half, vi{});
                continue;
            }
            for (int64_t u = 0; u < units; u += W) {
                vi x[W];
                for (int j = 0; j < W; ++j) x[j] = F::units(rows[half + j] + u * F::per_unit);
                transposed(x);
                for (int j = 0; j < W; ++j) store(my.keys + (u + j) * KEYS + half, x[j]);
            }
        }
    }

    // Scores to weights: scaled, capped, masked; tops, sums and shrinking factors of the rows go on.
    void soften(Scratch<F> &my, const Item &item, int64_t first, int keys) const {
        const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const int64_t before = c.ends[item.sequence] - (c.starts[item.sequence + 1] - c.starts[item.sequence]);
        for (int64_t r = 0; r < item.rows; ++r) {
            const int64_t position = before + (item.row + r) / group;
            float *scores = my.scores + r * KEYS;
            vf s[2] = {load<vf>(scores) * c.scale, load<vf>(scores + W) * c.scale};
            if (c.softcap != 0.f) for (vf &x : s) x = tangent(x / c.softcap) * c.softcap;
            const int high = int(std::min<int64_t>(keys, position + 1 - first));           // keys seen: low .. high - 1
            const int low = c.window ? int(std::max<int64_t>(0, position - c.window + 1 - first)) : 0;
            if (high < KEYS || low > 0) for (int half = 0; half < 2; ++half) {
                const vi key = lane + half * W;
                s[half] = ((key >= low) & (key < high)) ? s[half] : all(NONE);
            }
            const float most = largest(s[0] > s[1] ? s[0] : s[1]), top = my.top[r];
            my.shrink[r] = 1.f;
            if (most > top) {
                my.shrink[r] = top == NONE ? 0.f : std::exp(top - most);
                my.top[r] = most;
            }
            const float base = my.top[r] == NONE ? 0.f : my.top[r];
            s[0] = exponential(s[0] - base);
            s[1] = exponential(s[1] - base);
            my.sum[r] = my.sum[r] * my.shrink[r] + s[0] + s[1];
            store(scores, s[0]);
            store(scores + W, s[1]);
        }
    }

    void attend(Scratch<F> &my, const Item &item, int64_t head, int64_t from, int64_t to) const {
        pack_queries(my, item, head);
        int64_t offsets[KEYS];
        const T *values[KEYS];
        for (int64_t first = from; first < to; first += KEYS) {
            const int keys = int(std::min<int64_t>(KEYS, to - first));
            locate(item.sequence, first, keys, offsets);
            transpose_keys(my, offsets, keys, head);
            score<F>(my, int(item.rows), int(units));
            soften(my, item, first, keys);
            for (int j = 0; j < keys; ++j) {
                values[j] = (const T *)c.arena_v + offsets[j] + head * dim;
                if (dim != width) { std::memcpy(my.staged[j], values[j], dim * sizeof(T)); values[j] = my.staged[j]; }
            }
            add_values<T>(my.scores, my.shrink, values, keys, my.acc, int(width), int(item.rows));
        }
    }

    void finish(const Item &item, int64_t r, int64_t head, float top, float sum, const float *acc, T *row) const {
        const int64_t query = (item.row + r) / group, query_head = head * group + (item.row + r) % group;
        float factor = 1.f;
        if (c.sinks) {
            const float sink = c.sinks[query_head], most = std::max(top, sink);
            factor = std::exp(top - most);
            sum = sum * factor + std::exp(sink - most);
        }
        factor /= sum;
        T *to = (T *)c.out + ((c.starts[item.sequence] + query) * c.query_heads + query_head) * dim;
        for (int64_t d = 0; d < width; d += W) put((dim == width ? to : row) + d, load<vf>(acc + d) * factor);
        if (dim != width) std::memcpy(to, row, dim * sizeof(T));
    }

    void join(Scratch<F> &my, const Item &item, int64_t head, const Part *parts, int64_t many) const {
        for (int64_t r = 0; r < item.rows; ++r) {
            float top = NONE, sum = 0.f;
            for (int64_t p = 0; p < many; ++p) top = std::max(top, parts[p].top[r]);
            std::memset(my.acc, 0, width * sizeof(float));
            for (int64_t p = 0; p < many; ++p) {
                if (parts[p].sum[r] == 0.f) continue;  // a segment of which this row sees nothing
                const float factor = std::exp(parts[p].top[r] - top);
                sum += factor * parts[p].sum[r];
                for (int64_t d = 0; d < width; d += W) store(my.acc + d, load<vf>(my.acc + d) + load<vf>(parts[p].acc + r * width + d) * factor);
            }
            finish(item, r, head, top, sum, my.acc, my.out);
        }
    }

    std::vector<Item> items() const {
        std::vector<Item> found;
        found.reserve(c.sequences);
        for (int64_t s = 0; s < c.sequences; ++s) {
            const int64_t queries = c.starts[s + 1] - c.starts[s], before = c.ends[s] - queries;
            for (int64_t row = 0; row < queries * group; row += ROWS) {
                const int64_t rows = std::min<int64_t>(ROWS, queries * group - row);
                const int64_t first = c.window ? std::max<int64_t>(0, before + row / group - c.window + 1) : 0;
                found.push_back({s, row, rows, first, before + (row + rows - 1) / group + 1});
            }
        }
        return found;
    }

    void run() const {
        const std::vector<Item> tiles = items();
        const int64_t many = int64_t(tiles.size()) * c.kv_heads, enough = 4 * c.threads;
        int64_t segments = c.threads > 1 && many < enough ? std::min(enough / many + 1, (c.longest_keys + SHORTEST - 1) / SHORTEST) : 1;
        segments = std::max<int64_t>(1, segments);
        const int64_t size = ROWS * (2 + width);
        std::vector<float> room(segments > 1 ? many * segments * size : 0);
        auto part = [&](int64_t n) { float *at = room.data() + n * size; return Part{at, at + ROWS, at + 2 * ROWS}; };
#pragma omp parallel num_threads(int(c.threads))
        {
            Scratch<F> &my = scratch<F>();
            if (dim != padded) {  // what an earlier call, with larger heads, left behind
                std::memset(my.staged, 0, sizeof my.staged);
                std::memset(my.row, 0, sizeof my.row);
            }
#pragma omp for schedule(static)
            for (int64_t token = 0; token < c.tokens; ++token) write(token);
#pragma omp for schedule(dynamic, 1)
            for (int64_t n = 0; n < many * segments; ++n) {
                const Item &item = tiles[n / segments / c.kv_heads];
                const int64_t head = n / segments % c.kv_heads, segment = n % segments;
                const int64_t length = ((item.last - item.first + segments - 1) / segments + KEYS - 1) / KEYS * KEYS;
                const int64_t from = std::min(item.last, item.first + segment * length), to = std::min(item.last, from + length);
                attend(my, item, head, from, to);
                if (segments == 1) {
                    for (int64_t r = 0; r < item.rows; ++r) finish(item, r, head, my.top[r], total(my.sum[r]), my.acc + r * width, my.out);
                } else {
                    const Part mine = part(n);
                    for (int64_t r = 0; r < item.rows; ++r) { mine.top[r] = my.top[r]; mine.sum[r] = total(my.sum[r]); }
                    std::memcpy(mine.acc, my.acc, item.rows * width * sizeof(float));
                }
            }
            if (segments > 1) {
#pragma omp for schedule(static)
                for (int64_t n = 0; n < many; ++n) {
                    std::vector<Part> parts;
                    for (int64_t s = 0; s < segments; ++s) parts.push_back(part(n * segments + s));
                    join(my, tiles[n / c.kv_heads], n % c.kv_heads, parts.data(), segments);
                }
            }
        }
    }
};

}  // namespace

int kvbench_attend(const Call *call) {
    if (call->dim < 1 || call->dim > DIM || call->query_heads % call->kv_heads || call->sequences < 1) return 1;
    if (call->bfloat16) {
        if (call->bases) Kernel<Pairs, false>(*call).run(); else Kernel<Pairs, true>(*call).run();
    } else {
        if (call->bases) Kernel<Singles, false>(*call).run(); else Kernel<Singles, true>(*call).run();
    }
    return 0;
}
