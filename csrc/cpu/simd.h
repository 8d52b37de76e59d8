// Sixteen float32 lanes as one value: one zmm register, or two ymm. Every operation gives the same bits on both, so the
// AVX2 and AVX-512 builds of a model agree.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace mk {

#define MK_INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
#define MK_EACH(name, expr)                                  \
  MK_INLINE V name(V a, V b) { return V{expr(a.v, b.v)}; }
struct V {
  __m512 v;
};
MK_INLINE V load(const float* p) { return V{_mm512_loadu_ps(p)}; }
MK_INLINE void store(float* p, V a) { _mm512_storeu_ps(p, a.v); }
MK_INLINE V set1(float x) { return V{_mm512_set1_ps(x)}; }
MK_INLINE V fma(V a, V b, V c) { return V{_mm512_fmadd_ps(a.v, b.v, c.v)}; }
MK_EACH(operator+, _mm512_add_ps)
MK_EACH(operator-, _mm512_sub_ps)
MK_EACH(operator*, _mm512_mul_ps)
MK_EACH(operator/, _mm512_div_ps)
MK_EACH(vmax, _mm512_max_ps)
MK_EACH(vmin, _mm512_min_ps)
MK_INLINE V round_nearest(V a) { return V{_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a * 2^n for whole n in [-126, 127]
MK_INLINE V scale2(V a, V n) {
  __m512i e = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23);
  return V{_mm512_mul_ps(a.v, _mm512_castsi512_ps(e))};
}
// Lanes [from, to) of a, `other` in the rest.
MK_INLINE V keep_lanes(V a, int from, int to, float other) {
  uint32_t m = ((1u << to) - 1) & ~((1u << from) - 1);
  return V{_mm512_mask_blend_ps(static_cast<__mmask16>(m), _mm512_set1_ps(other), a.v)};
}
MK_INLINE __m256 lower(V a) { return _mm512_castps512_ps256(a.v); }
MK_INLINE __m256 upper(V a) { return _mm512_extractf32x8_ps(a.v, 1); }
#else
#define MK_EACH(name, expr)                                                            \
  MK_INLINE V name(V x, V y) { return V{expr(x.a, y.a), expr(x.b, y.b)}; }
struct V {
  __m256 a, b;
};
MK_INLINE V load(const float* p) { return V{_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
MK_INLINE void store(float* p, V x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
MK_INLINE V set1(float x) { return V{_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
MK_INLINE V fma(V x, V y, V z) { return V{_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
MK_EACH(operator+, _mm256_add_ps)
MK_EACH(operator-, _mm256_sub_ps)
MK_EACH(operator*, _mm256_mul_ps)
MK_EACH(operator/, _mm256_div_ps)
MK_EACH(vmax, _mm256_max_ps)
MK_EACH(vmin, _mm256_min_ps)
MK_INLINE V round_nearest(V x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return V{_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
MK_INLINE __m256 pow2(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
// a * 2^n for whole n in [-126, 127]
MK_INLINE V scale2(V x, V n) { return V{_mm256_mul_ps(x.a, pow2(n.a)), _mm256_mul_ps(x.b, pow2(n.b))}; }
// Lanes [from, to) of a, `other` in the rest.
MK_INLINE V keep_lanes(V x, int from, int to, float other) {
  alignas(32) float v[16];
  store(v, x);
  for (int i = 0; i < 16; i++)
    if (i < from || i >= to) v[i] = other;
  return load(v);
}
MK_INLINE __m256 lower(V x) { return x.a; }
MK_INLINE __m256 upper(V x) { return x.b; }
#endif
#undef MK_EACH

// Round to nearest, subnormals kept, whatever the caller's thread is set to: a scale may be subnormal while it is decoded.
class DefaultFloats {
 public:
  DefaultFloats() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultFloats() { _mm_setcsr(before_); }
  DefaultFloats(const DefaultFloats&) = delete;
  DefaultFloats& operator=(const DefaultFloats&) = delete;

 private:
  const unsigned before_;
};

MK_INLINE V zero() { return set1(0.0f); }

// One fixed tree on both widths: lane i with i+8, then i+4, i+2, i+1.
MK_INLINE float hsum(V x) {
  __m256 h = _mm256_add_ps(lower(x), upper(x));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
MK_INLINE float hmax(V x) {
  __m256 h = _mm256_max_ps(lower(x), upper(x));
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

MK_INLINE V vsqrt(V x) {
#if defined(__AVX512F__)
  return V{_mm512_sqrt_ps(x.v)};
#else
  return V{_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)};
#endif
}

// exp to about 1 ulp: 2^n * exp(r), |r| <= ln2/2, Taylor to r^7. Underflows to 0 below -87; callers never pass above 88.
MK_INLINE V vexp(V x) {
  V low = set1(-87.0f);
  V c = vmin(vmax(x, low), set1(88.0f));
  V n = round_nearest(c * set1(1.44269504f));
  V r = fma(n, set1(-0.693359375f), c);  // ln2 in two parts, so that r is exact to float32
  r = fma(n, set1(2.12194440e-4f), r);
  V p = set1(1.0f / 5040);
  p = fma(p, r, set1(1.0f / 720));
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  V y = scale2(p, n);
#if defined(__AVX512F__)
  return V{_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, low.v, _CMP_GE_OQ), y.v)};
#else
  return V{_mm256_and_ps(y.a, _mm256_cmp_ps(x.a, low.a, _CMP_GE_OQ)),
           _mm256_and_ps(y.b, _mm256_cmp_ps(x.b, low.b, _CMP_GE_OQ))};
#endif
}

MK_INLINE V sigmoid(V x) { return set1(1.0f) / (set1(1.0f) + vexp(zero() - x)); }

}  // namespace mk
