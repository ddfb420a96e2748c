// L2 norm over all elements of many tensors. The squares are added in double, in chunks of fixed size, and the sums of
// the chunks are added in order, so the result does not depend on the threads.
#include <math.h>

#include "gptlite_kernels.h"
#include "parallel.h"
#include "simd.h"
#include "tensor_line.h"

namespace gptlite {
namespace GPTLITE_ISA {
namespace {

constexpr int64_t kChunk = 65536;  // elements; gptlite_norm_workspace uses the same number
constexpr int kAccumulators = 4;
constexpr int kAhead = 4096;  // prefetch distance in bytes; the CPU alone does not fetch far enough ahead

typedef double Doubles __attribute__((vector_size(4 * kLanes)));  // as many bytes as Vec, half as many lanes

#if defined(__AVX512F__)
GPTLITE_INLINE Doubles lower(Vec v) { return _mm512_cvtps_pd(lower_half(v)); }
GPTLITE_INLINE Doubles upper(Vec v) { return _mm512_cvtps_pd(upper_half(v)); }
#elif defined(__AVX2__)
GPTLITE_INLINE Doubles lower(Vec v) { return _mm256_cvtps_pd(_mm256_castps256_ps128(v)); }
GPTLITE_INLINE Doubles upper(Vec v) { return _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)); }
#elif defined(__aarch64__)
GPTLITE_INLINE Doubles lower(Vec v) { return vcvt_f64_f32(vget_low_f32(v)); }
GPTLITE_INLINE Doubles upper(Vec v) { return vcvt_high_f64_f32(v); }
#else
GPTLITE_INLINE Doubles lower(Vec v) { return Doubles{v[0], v[1]}; }
GPTLITE_INLINE Doubles upper(Vec v) { return Doubles{v[2], v[3]}; }
#endif

// Returns the sum of squares, in double: squares are exact and do not overflow, and the memory remains the bottleneck.
template <class T>
double sum_of_squares(const T* x, int64_t count) {
  Doubles sums[kAccumulators][2] = {};
  for_columns<kAccumulators>(count, [&](int64_t i, auto at, auto lanes) GPTLITE_LAMBDA {
    __builtin_prefetch(reinterpret_cast<const char*>(x + i) + kAhead);
    const Vec v = load(x + i, lanes);
    sums[at][0] += lower(v) * lower(v);
    sums[at][1] += upper(v) * upper(v);
  });
  Doubles total = {};
  for (const auto& pair : sums) total += pair[0] + pair[1];
  double result = 0;
  for (int lane = 0; lane < kLanes / 2; ++lane) result += total[lane];
  return result;
}

}  // namespace

int norm(float* out, float* workspace, const void* const* tensors, const int64_t* counts, int64_t num_tensors, int dtype,
         void* context) {
  const auto count_of = [=](int64_t tensor) { return counts[tensor]; };
  const int64_t chunks = (line_length(num_tensors, count_of) + kChunk - 1) / kChunk;
  const int error = with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    parallel(context, chunks, 1, [&](int64_t first, int64_t last) {
      for (int64_t chunk = first; chunk < last; ++chunk) {
        double sum = 0;
        for_parts(num_tensors, count_of, chunk * kChunk, (chunk + 1) * kChunk,
                  [&](int64_t tensor, int64_t from, int64_t to) {
                    sum += sum_of_squares(static_cast<const T*>(tensors[tensor]) + from, to - from);
                  });
        memcpy(workspace + 2 * chunk, &sum, sizeof sum);  // may not be aligned to a double
      }
    });
    return 0;
  });
  if (error != 0) return error;
  double total = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    double sum;
    memcpy(&sum, workspace + 2 * chunk, sizeof sum);
    total += sum;
  }
  out[0] = static_cast<float>(::sqrt(total));
  return 0;
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
