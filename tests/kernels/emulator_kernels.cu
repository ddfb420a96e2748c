// Kernels for test_emulator.py: right ones, and ones with a single fault each, in the line that says so.
#include "launch.cuh"

constexpr unsigned kAll = 0xffffffffu;

#define KERNEL(name) static __global__ void name(float* out, const float* in, int64_t n)
#define LAUNCH(name, grid, block, shared)                                        \
  extern "C" int test_##name(float* out, const float* in, int64_t n) {           \
    return gptlite::emu::launch(name, grid, block, shared, nullptr, out, in, n); \
  }
#define FAULTY(name, block, shared) LAUNCH(name, 1, block, shared)

// ---- Right ones

// out[row] = sum of n numbers, by blocks of any whole number of warps.
KERNEL(row_sums) {
  GPTLITE_SHARED(float, partial);
  float total = 0.0f;
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) total += in[blockIdx.x * n + i];
  for (int offset = 16; offset > 0; offset /= 2) total += __shfl_xor_sync(kAll, total, offset);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = total;
  __syncthreads();
  total = 0.0f;
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) total += partial[warp];
  if (threadIdx.x == 0) out[blockIdx.x] = total;
}
LAUNCH(row_sums, 50, 96, 12)

// Tiles of 32 x 32, by two-dimensional blocks in a two-dimensional grid: out [n, n] is in, transposed.
KERNEL(transpose) {
  __shared__ float tile[32][33];
  const int64_t column = blockIdx.x * 32 + threadIdx.x;
  for (int64_t row = threadIdx.y; row < 32; row += blockDim.y)
    if (column < n && blockIdx.y * 32 + row < n) tile[row][threadIdx.x] = in[(blockIdx.y * 32 + row) * n + column];
  __syncthreads();
  const int64_t out_column = blockIdx.y * 32 + threadIdx.x;
  for (int64_t row = threadIdx.y; row < 32; row += blockDim.y)
    if (out_column < n && blockIdx.x * 32 + row < n)
      out[(blockIdx.x * 32 + row) * n + out_column] = tile[threadIdx.x][row];
}
LAUNCH(transpose, dim3((n + 31) / 32, (n + 31) / 32), dim3(32, 4), 0)

// Inclusive prefix sums of 64 numbers, in groups of 8.
KERNEL(prefix_sums) {
  float total = in[threadIdx.x];
  for (unsigned delta = 1; delta < 8; delta *= 2) {
    const float before = __shfl_up_sync(kAll, total, delta, 8);
    if (threadIdx.x % 8 >= delta) total += before;
  }
  out[threadIdx.x] = total;
}
LAUNCH(prefix_sums, 1, 64, 0)

// out[lane]: of each half of a warp, what a shuffle of doubles, of 64-bit integers and one downwards bring.
KERNEL(shuffles) {
  const int lane = static_cast<int>(threadIdx.x);
  const double wide = __shfl_sync(kAll, static_cast<double>(in[lane]), 5, 16);
  const int64_t number = __shfl_xor_sync(kAll, int64_t{1} << (lane + 20), 3);
  const float below = __shfl_down_sync(kAll, in[lane], 4, 16);
  out[lane] = static_cast<float>(wide);
  out[32 + lane] = static_cast<float>(number >> 20);
  out[64 + lane] = below;
}
LAUNCH(shuffles, 1, 32, 0)

// A part of a warp may shuffle by itself, whatever the rest does, and whole warps may leave.
KERNEL(parts) {
  if (threadIdx.x >= 64) return;
  float value = in[threadIdx.x];
  if (threadIdx.x % 32 < 16) value += __shfl_xor_sync(0xffffu, value, 8);
  __syncwarp();
  out[threadIdx.x] = __shfl_sync(kAll, value, 15);
}
LAUNCH(parts, 1, 128, 0)

// Neighbours within a warp, by shared memory; then across warps, by global memory.
KERNEL(neighbours) {
  GPTLITE_SHARED(float, values);
  const unsigned at = threadIdx.x, warp = at / 32 * 32;
  values[at] = in[at];
  __syncwarp();
  const float next = values[warp + (at + 1) % 32];
  __syncwarp();
  values[at] = next;
  out[at] = values[at];
  __syncthreads();
  const float other = out[(at + 32) % blockDim.x];
  __syncthreads();
  out[at] = other;
}
LAUNCH(neighbours, 1, 128, 512)

// Whole packs, 16 bytes at once.
KERNEL(packs) {
  for (int64_t i = threadIdx.x; i < n / 4; i += blockDim.x) {
    float4 pack = reinterpret_cast<const float4*>(in)[i];
    pack.x *= 2.0f;
    reinterpret_cast<float4*>(out)[i] = pack;
  }
}
LAUNCH(packs, 1, 32, 0)

KERNEL(index_of_thread) {
  const unsigned columns = gridDim.x, rows = gridDim.y;
  const unsigned block = (blockIdx.z * rows + blockIdx.y) * columns + blockIdx.x;
  const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] = static_cast<float>(block * 1000 + thread);
}
LAUNCH(index_of_thread, dim3(2, 3, 4), dim3(5, 3, 2), 0)

KERNEL(leaves_some_unwritten) {
  if (threadIdx.x < n) out[threadIdx.x] = 1.0f;
}
LAUNCH(leaves_some_unwritten, 1, 32, 0)

struct Pair {
  float first;
  float second[3];
};

// Structs by value, each thread's own.
static __global__ void takes_struct(float* out, Pair pair) {
  pair.second[1] += static_cast<float>(threadIdx.x);
  out[threadIdx.x] = pair.first + pair.second[1];
}
extern "C" int test_takes_struct(float* out, const float*, int64_t n) {
  return gptlite::emu::launch(takes_struct, 1, 32, 0, nullptr, out, Pair{1.0f, {0.0f, static_cast<float>(n), 0.0f}});
}

// ---- Memory

KERNEL(reads_past_end) { out[threadIdx.x] = in[threadIdx.x + n - 31]; }  // FAULT reads_past_end
FAULTY(reads_past_end, 32, 0)

KERNEL(writes_past_end) { out[threadIdx.x + n - 31] = 1.0f; }  // FAULT writes_past_end
FAULTY(writes_past_end, 32, 0)

KERNEL(reads_before_start) { out[threadIdx.x] = in[static_cast<int>(threadIdx.x) - 1]; }  // FAULT reads_before_start
FAULTY(reads_before_start, 32, 0)

KERNEL(writes_input) { const_cast<float*>(in)[threadIdx.x] = 1.0f; }  // FAULT writes_input
FAULTY(writes_input, 32, 0)

KERNEL(reads_null) { out[0] = *reinterpret_cast<const float*>(n - n); }  // FAULT reads_null
FAULTY(reads_null, 1, 0)

static __global__ void reads_host_memory(float* out, const Pair* pair) {
  out[0] = pair->first;  // FAULT reads_host_memory
}
extern "C" int test_reads_host_memory(float* out, const float*, int64_t) {
  const Pair pair{};
  return gptlite::emu::launch(reads_host_memory, 1, 1, 0, nullptr, out, &pair);
}

KERNEL(pack_past_end) { reinterpret_cast<float4*>(out)[n / 4] = float4{}; }  // FAULT pack_past_end
FAULTY(pack_past_end, 1, 0)

KERNEL(misaligned_pack) { reinterpret_cast<float4*>(out + 1)[threadIdx.x] = float4{}; }  // FAULT misaligned_pack
FAULTY(misaligned_pack, 1, 0)

KERNEL(shared_past_end) {
  GPTLITE_SHARED(float, values);
  values[threadIdx.x] = 1.0f;  // FAULT shared_past_end
}
FAULTY(shared_past_end, 32, 31 * 4)

KERNEL(unwritten_shared) {
  GPTLITE_SHARED(float, values);
  if (threadIdx.x != 5) values[threadIdx.x] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = values[threadIdx.x];  // FAULT unwritten_shared
}
FAULTY(unwritten_shared, 32, 32 * 4)

// What an earlier block wrote to a static is gone.
KERNEL(unwritten_static) {
  __shared__ float values[32];
  if (in[0] != in[0] || blockIdx.x % 2 == 0) values[threadIdx.x] = 1.0f;
  __syncthreads();
  out[blockIdx.x * 32 + threadIdx.x] = values[threadIdx.x];  // FAULT unwritten_static
}
LAUNCH(unwritten_static, 4, 32, 0)

KERNEL(unwritten_output) { out[threadIdx.x] += in[threadIdx.x]; }  // FAULT unwritten_output
FAULTY(unwritten_output, 32, 0)

KERNEL(past_array) {
  float values[4] = {in[0], in[1], in[2], in[3]};
  out[0] = values[n % 32 + 4];  // FAULT past_array
}
FAULTY(past_array, 1, 0)

KERNEL(copies_past_end) { memcpy(out, in, static_cast<size_t>(n) * 4 + 4); }  // FAULT copies_past_end
FAULTY(copies_past_end, 1, 0)

KERNEL(never_ends) {
  for (int64_t i = 0; in[0] < 2.0f; i += n - n) out[i] = 0.0f;  // FAULT never_ends
}
FAULTY(never_ends, 1, 0)

// ---- Races

KERNEL(read_without_barrier) {
  GPTLITE_SHARED(float, values);
  values[threadIdx.x] = 1.0f;  // FAULT read_without_barrier
  out[threadIdx.x] = values[63 - threadIdx.x];  // FAULT read_without_barrier
}
FAULTY(read_without_barrier, 64, 64 * 4)

KERNEL(write_without_barrier) {
  GPTLITE_SHARED(float, values);
  values[threadIdx.x] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = values[63 - threadIdx.x];  // FAULT write_without_barrier
  values[threadIdx.x] = 2.0f;  // FAULT write_without_barrier
}
FAULTY(write_without_barrier, 64, 64 * 4)

KERNEL(two_writers) {
  GPTLITE_SHARED(float, values);
  values[threadIdx.x / 64] = 1.0f;  // FAULT two_writers
}
FAULTY(two_writers, 128, 8)

// Several readers, of which the last is the writer, in a warp and in two.
KERNEL(many_readers_in_warp) {
  GPTLITE_SHARED(float, values);
  if (threadIdx.x == 0) values[0] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = values[0];  // FAULT many_readers_in_warp
  if (threadIdx.x == 3) values[0] = 2.0f;  // FAULT many_readers_in_warp
}
FAULTY(many_readers_in_warp, 32, 4)

KERNEL(many_readers) {
  GPTLITE_SHARED(float, values);
  if (threadIdx.x == 0) values[0] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = values[0];  // FAULT many_readers
  __syncwarp();
  if (threadIdx.x == 3) values[0] = 2.0f;  // FAULT many_readers
}
FAULTY(many_readers, 64, 4)

KERNEL(shuffle_is_no_barrier) {
  GPTLITE_SHARED(float, values);
  values[threadIdx.x] = 1.0f;  // FAULT shuffle_is_no_barrier
  __shfl_xor_sync(kAll, 1.0f, 1);
  out[threadIdx.x] = values[threadIdx.x ^ 1];  // FAULT shuffle_is_no_barrier
}
FAULTY(shuffle_is_no_barrier, 32, 32 * 4)

KERNEL(blocks_write_same) { out[threadIdx.x] = 1.0f; }  // FAULT blocks_write_same
LAUNCH(blocks_write_same, 2, 32, 0)

KERNEL(block_reads_others) {
  out[blockIdx.x] = 1.0f;  // FAULT block_reads_others
  if (out[1 - blockIdx.x] == 0.0f) out[blockIdx.x] = 2.0f;  // FAULT block_reads_others
}
LAUNCH(block_reads_others, 2, 1, 0)

// ---- Barriers and shuffles that not all reach

KERNEL(exits_before_barrier) {
  if (threadIdx.x == 40) return;
  __syncthreads();  // FAULT exits_before_barrier
}
FAULTY(exits_before_barrier, 64, 0)

KERNEL(two_barriers) {
  if (threadIdx.x < 32)
    __syncthreads();  // FAULT two_barriers
  else
    __syncthreads();  // FAULT two_barriers
}
FAULTY(two_barriers, 64, 0)

KERNEL(barrier_against_shuffle) {
  if (threadIdx.x % 32 < 16) __syncthreads();  // FAULT barrier_against_shuffle
  out[threadIdx.x] = __shfl_xor_sync(kAll, 1.0f, 1);  // FAULT barrier_against_shuffle
}
FAULTY(barrier_against_shuffle, 64, 0)

KERNEL(lane_exits) {
  if (threadIdx.x == 7) return;
  out[threadIdx.x] = __shfl_xor_sync(kAll, 1.0f, 16);  // FAULT lane_exits
}
FAULTY(lane_exits, 32, 0)

KERNEL(mask_leaves_out_itself) {
  out[threadIdx.x] = __shfl_xor_sync(0xffffu, 1.0f, 1);  // FAULT mask_leaves_out_itself
}
FAULTY(mask_leaves_out_itself, 32, 0)

KERNEL(reads_absent_lane) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_down_sync(0xffffu, 1.0f, 8);  // FAULT reads_absent_lane
}
FAULTY(reads_absent_lane, 32, 0)

KERNEL(part_of_a_warp) { out[threadIdx.x] = __shfl_xor_sync(kAll, 1.0f, 1); }  // FAULT part_of_a_warp
FAULTY(part_of_a_warp, 48, 0)

KERNEL(divergent_syncwarp) {
  if (threadIdx.x % 2) __syncwarp();  // FAULT divergent_syncwarp
}
FAULTY(divergent_syncwarp, 32, 0)

KERNEL(odd_width) { out[threadIdx.x] = __shfl_xor_sync(kAll, 1.0f, 1, 12); }  // FAULT odd_width
FAULTY(odd_width, 32, 0)

// ---- Arithmetic

KERNEL(index_overflows) { out[0] = in[static_cast<int>(n) * 100000000 % 7]; }  // FAULT index_overflows
FAULTY(index_overflows, 1, 0)

KERNEL(sum_overflows) { out[0] = static_cast<float>(static_cast<int>(n) + 2147483640); }  // FAULT sum_overflows
FAULTY(sum_overflows, 1, 0)

KERNEL(divides_by_zero) { out[0] = static_cast<float>(7 / (n - 64)); }  // FAULT divides_by_zero
FAULTY(divides_by_zero, 1, 0)

KERNEL(nothing) {}
FAULTY(nothing, 1, 0)

extern "C" int test_overflow_in_launcher(float*, const float*, int64_t n) { return int(n) * 100000000 % 7; }

// The status of a launch of these sizes, of a kernel with leave for so much dynamic shared memory (0: none asked for).
extern "C" int test_limits(int64_t x, int64_t y, int64_t z, int64_t threads, int64_t shared, int64_t leave) {
  if (leave) {
    const int status = cudaFuncSetAttribute(reinterpret_cast<const void*>(nothing),
                                            cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(leave));
    if (status) return status * 100;
  }
  const dim3 grid(static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z));
  return gptlite::emu::launch(nothing, grid, static_cast<unsigned>(threads), shared, nullptr, nullptr, nullptr, 0);
}

extern "C" int test_processors() { return static_cast<int>(gptlite::processors()); }
