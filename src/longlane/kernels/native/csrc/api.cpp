// What Python calls. Shapes are checked there.
#include "llama.h"

using namespace longlane;

extern "C" {

// y [m, rows] = x [m, columns] W^T
void longlane_linear(const Matrix* w, const float* x, int32_t m, float* y, int32_t threads) {
  const size_t groups = w->groups();
  std::vector<Activation> quantized(m * groups);
  run(threads, [&](Pool& pool, int id) {
    const Range tokens = share(m, id, pool.size());
    for (int t = tokens.begin; t < tokens.end; ++t)
      quantize(x + static_cast<size_t>(t) * w->columns, w->columns, quantized.data() + t * groups);
    pool.barrier();
    const Range panels = share(w->panels(), id, pool.size());
    multiply(*w, quantized.data(), m, panels.begin, panels.end, store_to(y, *w));
  });
}

void longlane_llama(const Geometry* geometry, const Layer* layers, const Pages* pages, const Step* step, int32_t threads) {
  Llama model(*geometry, layers, pages, *step);
  run(threads, [&](Pool& pool, int id) { model.forward(pool, id); });
}

}  // extern "C"
