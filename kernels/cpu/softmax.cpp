// Softmax of attention scores, forward and backward, with an arbitrary mask tensor or the causal mask:
// y = softmax(scale * x + mask), and dx = scale * y * (dy - sum(dy * y)).
#include <math.h>
#include <string.h>

#include "parallel.h"
#include "simd.h"

namespace gptlite {
namespace GPTLITE_ISA {
namespace {

// Maximum width of 16-bit rows whose exponentials are kept as fp32 between the passes. For wider rows they are computed
// twice.
constexpr int64_t kKept = 16384;

struct NoMask {
  template <class Lanes>
  GPTLITE_LAMBDA Vec operator()(Vec x, int64_t, Lanes) const {
    return x;
  }
};

// A row of a boolean mask. The stride between its elements may be other than 1, and is 0 for a broadcast mask.
struct BoolMask {
  const uint8_t* data;
  int64_t stride;

  template <class Lanes>
  GPTLITE_LAMBDA Vec operator()(Vec x, int64_t column, Lanes lanes) const {
    return select(left_out(column, lanes), broadcast(-INFINITY), x);
  }
  template <class Lanes>
  GPTLITE_LAMBDA Mask left_out(int64_t column, Lanes lanes) const {
    if (stride == 1) return load_bools(data + column, lanes);
    uint8_t near[kLanes] = {};
    for (int lane = 0; lane < lanes_in(lanes); ++lane) near[lane] = data[(column + lane) * stride];
    return load_bools(near, All{});
  }
};

template <class T>
struct AddedMask {
  const T* data;
  int64_t stride;

  template <class Lanes>
  GPTLITE_LAMBDA Vec operator()(Vec x, int64_t column, Lanes lanes) const {
    return x + added(column, lanes);
  }
  template <class Lanes>
  GPTLITE_LAMBDA Vec added(int64_t column, Lanes lanes) const {
    if (stride == 1) return load(data + column, lanes);
    T near[kLanes] = {};
    for (int lane = 0; lane < lanes_in(lanes); ++lane) near[lane] = data[(column + lane) * stride];
    return load(near, All{});
  }
};

// Writes the softmax of a row to y. exps(column, lanes) returns the exponentials exp(score - maximum), and 0 past the
// row. They are kept in y itself if it is fp32, else in a buffer.
template <class T, class Exps>
GPTLITE_INLINE void normalized(T* y, int64_t width, Exps exps) {
  const bool kept = sizeof(T) == sizeof(float) || width <= kKept;
  alignas(64) float near[sizeof(T) == sizeof(float) ? 1 : kKept];
  float* const keep = sizeof(T) == sizeof(float) ? reinterpret_cast<float*>(y) : near;
  float total[1];
  sum_columns<1>(width, total, [&](int64_t column, auto lanes, Vec* terms) GPTLITE_LAMBDA {
    const Vec e = exps(column, lanes);
    if (kept) store(keep + column, e, lanes);
    terms[0] += e;
  });
  // A row in which all scores are -inf becomes zeros.
  const float inverse = total[0] == 0.0f ? 0.0f : 1.0f / total[0];
  for_columns<4>(width, [&](int64_t column, auto, auto lanes) GPTLITE_LAMBDA {
    const Vec e = kept ? load(keep + column, lanes) : exps(column, lanes);
    store(y + column, e * inverse, lanes);
  });
}

template <class T, class RowMask>
GPTLITE_INLINE void softmax_row(T* y, const T* x, int64_t width, float scale, const RowMask& mask) {
  const auto score = [&](int64_t column, auto lanes) GPTLITE_LAMBDA {
    return mask(load(x + column, lanes) * scale, column, lanes);
  };
  const float least = -INFINITY;
  Vec tops[4] = {broadcast(least), broadcast(least), broadcast(least), broadcast(least)};
  for_columns<4>(width, [&](int64_t column, auto k, auto lanes) GPTLITE_LAMBDA {
    tops[k.value] = max(fill_past(score(column, lanes), lanes, least), tops[k.value]);
  });
  const float top = max_lane(max(max(tops[0], tops[1]), max(tops[2], tops[3])));
  // If all scores are -inf or NaN, subtract 0: -inf - -inf is NaN. A NaN score still makes the sum NaN.
  const Vec shift = broadcast(top == least ? 0.0f : top);
  normalized(y, width, [&](int64_t column, auto lanes) GPTLITE_LAMBDA {
    return zero_past(exp_below_88(score(column, lanes) - shift), lanes);
  });
}

template <class T>
GPTLITE_INLINE void softmax_row_backward(T* dx, const T* dy, const T* y, int64_t width, float scale) {
  float dot[1];
  sum_columns<1>(width, dot, [&](int64_t column, auto lanes, Vec* terms) GPTLITE_LAMBDA {
    terms[0] = fma(load(dy + column, lanes), load(y + column, lanes), terms[0]);
  });
  for_columns<4>(width, [&](int64_t column, auto, auto lanes) GPTLITE_LAMBDA {
    const Vec slope = load(y + column, lanes) * (load(dy + column, lanes) - dot[0]);
    store(dx + column, slope * scale, lanes);
  });
}

// Runs softmax_row over all rows. mask_of_row(b, h, q) returns the mask of a row.
template <class T, class MaskOf>
int masked_rows(T* y, const T* x, int64_t batch, int64_t heads, int64_t queries, int64_t keys, float scale,
                const void* context, MaskOf mask_of_row) {
  parallel(context, batch * heads * queries, task_items(keys), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const int64_t query = row % queries, matrix = row / queries;
      softmax_row(y + row * keys, x + row * keys, keys, scale, mask_of_row(matrix / heads, matrix % heads, query));
    }
  });
  return 0;
}

// Returns how many keys a query sees under the causal mask.
int64_t keys_seen(int64_t query, int64_t queries, int64_t keys) {
  const int64_t seen = query + keys - queries + 1;
  return seen < 0 ? 0 : seen;
}

}  // namespace

int masked_softmax_forward(void* y, const void* x, const void* mask, int mask_dtype, const int64_t* mask_strides,
                           int64_t batch, int64_t heads, int64_t queries, int64_t keys, float scale, int dtype,
                           void* context) {
  const int64_t* const strides = mask_strides;
  return with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    const auto run = [&](auto mask_of_row) {
      return masked_rows(static_cast<T*>(y), static_cast<const T*>(x), batch, heads, queries, keys, scale, context,
                         mask_of_row);
    };
    const auto offset = [&](int64_t b, int64_t h, int64_t q) {
      return b * strides[0] + h * strides[1] + q * strides[2];
    };
    if (mask_dtype == GPTLITE_NONE) return run([](int64_t, int64_t, int64_t) { return NoMask{}; });
    if (mask_dtype == GPTLITE_BOOL) {
      const uint8_t* const data = static_cast<const uint8_t*>(mask);
      return run([&](int64_t b, int64_t h, int64_t q) { return BoolMask{data + offset(b, h, q), strides[3]}; });
    }
    return with_dtype(mask_dtype, [&](auto mask_element) {
      using M = decltype(mask_element);
      const M* const data = static_cast<const M*>(mask);
      return run([&](int64_t b, int64_t h, int64_t q) { return AddedMask<M>{data + offset(b, h, q), strides[3]}; });
    });
  });
}

int masked_softmax_backward(void* dx, const void* dy, const void* y, int64_t rows, int64_t keys, float scale, int dtype,
                            void* context) {
  return with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    parallel(context, rows, task_items(keys), [&](int64_t first, int64_t last) {
      for (int64_t at = first * keys; at < last * keys; at += keys) {
        softmax_row_backward(static_cast<T*>(dx) + at, static_cast<const T*>(dy) + at, static_cast<const T*>(y) + at,
                             keys, scale);
      }
    });
    return 0;
  });
}

int causal_softmax_forward(void* y, const void* x, int64_t matrices, int64_t queries, int64_t keys, float scale,
                           int dtype, void* context) {
  return with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    parallel(context, matrices * queries, task_items(keys), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        T* const out = static_cast<T*>(y) + row * keys;
        const int64_t seen = keys_seen(row % queries, queries, keys);
        softmax_row(out, static_cast<const T*>(x) + row * keys, seen, scale, NoMask{});
        memset(out + seen, 0, static_cast<size_t>(keys - seen) * sizeof(T));
      }
    });
    return 0;
  });
}

int causal_softmax_backward(void* dx, const void* dy, const void* y, int64_t matrices, int64_t queries, int64_t keys,
                            float scale, int dtype, void* context) {
  return with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    parallel(context, matrices * queries, task_items(keys), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        T* const out = static_cast<T*>(dx) + row * keys;
        const int64_t seen = keys_seen(row % queries, queries, keys);
        softmax_row_backward(out, static_cast<const T*>(dy) + row * keys, static_cast<const T*>(y) + row * keys, seen,
                             scale);
        memset(out + seen, 0, static_cast<size_t>(keys - seen) * sizeof(T));
      }
    });
    return 0;
  });
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
