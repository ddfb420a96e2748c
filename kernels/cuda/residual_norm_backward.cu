// Gradients of the residual sum and the norm after it (residual_norm.cu). h, dy and dh are read once, dresidual is
// written, and with dropout dx too: 4 or 5 elements moved per element. A file of its own, since it takes nvcc longest.
#include "norm_backward.cuh"

int gptlite_cuda_residual_norm_backward(void* dx, void* dresidual, void* dbias, void* dweight, void* dbeta,
                                        float* workspace, const void* dy, const void* dh, const void* h,
                                        const void* weight, const float* mean, const float* rstd, int64_t batch,
                                        int64_t positions, int64_t width, const GptliteDropout* dropout, int dtype,
                                        int weight_dtype, float* amax, void* stream) {
  using namespace gptlite;
  NormGradient g = {};
  g.dx = dropout != nullptr ? dx : nullptr;
  g.dh = dresidual;
  g.parts = workspace;
  g.dy = dy;
  g.add = dh;
  g.h = h;
  g.weight = weight;
  g.weight_dtype = weight_dtype;
  g.mean = mean;
  g.rstd = rstd;
  g.rows = batch * positions;
  g.width = width;
  g.positions = positions;
  g.amax = amax;
  if (dropout != nullptr) g.dropout = *dropout;
  if (mean == nullptr && g.rows > 0) {  // with 0 rows, `mean` may be NULL for a layer norm too
    if (dbias == nullptr) return norm_backward<true, true, 1>(g, {dweight}, dtype, stream);
    return norm_backward<true, true, 2>(g, {dweight, dbias}, dtype, stream);
  }
  if (dbias == nullptr) return norm_backward<true, false, 2>(g, {dweight, dbeta}, dtype, stream);
  return norm_backward<true, false, 3>(g, {dweight, dbeta, dbias}, dtype, stream);
}
