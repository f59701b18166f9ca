// Compiles CUDA kernels as C++ for the CPU, so that tests can compare the kernels' arithmetic and barriers with numpy without a GPU.
//
// Blocks run one after another. The threads of a block are fibers of one CPU thread. A fiber runs until it waits for others (barrier,
// shuffle, vote) or ends. The order of the fibers is drawn from the launch's seed, so code that lacks a barrier gives wrong results with
// some seed. When a block starts, shared memory contains 0xFF bytes (NaN, -1).
//
// Behaviour that CUDA leaves undefined is an error if it can be detected: a barrier that some threads never reach, a shuffle that names
// lanes that have ended, a write beyond dynamic shared memory. Not supported: blocks that wait for each other, cooperative groups,
// textures, streams. The kernels exclude inline PTX by `#ifndef CUDA_ON_CPU`.
#pragma once
#define CUDA_ON_CPU 1

#include <link.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#define __global__ static
#define __device__
#define __host__
#define __constant__ static
#define __shared__ static thread_local
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __forceinline__ inline __attribute__((always_inline))
#undef __noinline__
#define __noinline__ __attribute__((noinline))

// ------------------------------------------------------------------------------------------------------------------ vector types

#define CUDA_ON_CPU_VECTORS(T, name, a2, a4)                                                                   \
  struct name##1 { T x; };                                                                                     \
  struct alignas(a2) name##2 { T x, y; };                                                                      \
  struct name##3 { T x, y, z; };                                                                               \
  struct alignas(a4) name##4 { T x, y, z, w; };                                                                \
  static inline name##1 make_##name##1(T x) { return {x}; }                                                    \
  static inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                            \
  static inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                                    \
  static inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
CUDA_ON_CPU_VECTORS(signed char, char, 2, 4)
CUDA_ON_CPU_VECTORS(unsigned char, uchar, 2, 4)
CUDA_ON_CPU_VECTORS(short, short, 4, 8)
CUDA_ON_CPU_VECTORS(unsigned short, ushort, 4, 8)
CUDA_ON_CPU_VECTORS(int, int, 8, 16)
CUDA_ON_CPU_VECTORS(unsigned int, uint, 8, 16)
CUDA_ON_CPU_VECTORS(long long, longlong, 16, 16)
CUDA_ON_CPU_VECTORS(unsigned long long, ulonglong, 16, 16)
CUDA_ON_CPU_VECTORS(float, float, 8, 16)
CUDA_ON_CPU_VECTORS(double, double, 16, 16)

struct dim3 {
  unsigned int x, y, z;
};

// ------------------------------------------------------------------------------------------------------------------ the machine

namespace cuda_on_cpu {

constexpr int WARP = 32;
constexpr int MAX_THREADS = 1024;
constexpr size_t STACK_BYTES = 256 << 10;
constexpr size_t MAX_SHARED_BYTES = 227 << 10;
constexpr size_t GUARD_BYTES = 4096;
constexpr unsigned char POISON = 0xFF;

enum class State { READY, AT_BLOCK, AT_WARP, ENDED };

struct Fiber {
  ucontext_t first;
  jmp_buf at;
  bool started = false;
  State state = State::ENDED;
  unsigned mask = 0;
  int op = 0;
  int from = 0;
  unsigned long long given = 0, got = 0;
};

// Source: splitmix64, by Sebastiano Vigna.
struct Random {
  unsigned long long state = 0;
  void seed(unsigned long long value) { state = value; }
  size_t operator()() {
    unsigned long long z = state += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
  }
};

using Reduce = unsigned long long (*)(const Fiber* warp, unsigned mask, int lane);

static dim3 the_grid, the_block, the_block_at, the_thread_at;
alignas(1024) static unsigned char dynamic_shared[MAX_SHARED_BYTES + GUARD_BYTES];
static std::vector<Fiber> fibers;
static unsigned char* stacks = nullptr;
static jmp_buf scheduler;
static int current = 0, num_threads = 0, num_at_block = 0, num_ended = 0, votes = 0, votes_seen = 0;
static std::vector<int> ready;
static Random order;
static bool is_random = false;
static std::string error;
static void (*body)(void*) = nullptr;
static void* body_argument = nullptr;

// `noipa` hides this call from the compiler, which therefore writes shared memory back before the call and reads it again afterwards.
__attribute__((noipa)) static void suspend() {
  Fiber& me = fibers[current];
  if (_setjmp(me.at) == 0) _longjmp(scheduler, 1);
}

__attribute__((noipa)) static void resume(int thread) {
  current = thread;
  unsigned t = thread;
  the_thread_at = {t % the_block.x, t / the_block.x % the_block.y, t / the_block.x / the_block.y};
  Fiber& fiber = fibers[thread];
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.at, 1);
  fiber.started = true;
  setcontext(&fiber.first);
}

static void fail(const std::string& what) {
  if (error.empty())
    error = what + " (block " + std::to_string(the_block_at.x) + "," + std::to_string(the_block_at.y) + "," +
            std::to_string(the_block_at.z) + " thread " + std::to_string(current) + ")";
}

static void fiber_main() {
  for (;;) {
    body(body_argument);
    fibers[current].state = State::ENDED;
    ++num_ended;
    suspend();
  }
}

static void make_fibers() {
  if (!stacks) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    stacks = (unsigned char*)mmap(nullptr, STACK_BYTES * MAX_THREADS, PROT_READ | PROT_WRITE, flags, -1, 0);
    fibers.resize(MAX_THREADS);
  }
  for (int i = 0; i < MAX_THREADS; ++i) {
    Fiber& fiber = fibers[i];
    fiber.started = false;
    getcontext(&fiber.first);
    fiber.first.uc_stack.ss_sp = stacks + i * STACK_BYTES;
    fiber.first.uc_stack.ss_size = STACK_BYTES;
    fiber.first.uc_link = nullptr;
    makecontext(&fiber.first, fiber_main, 0);
  }
}

static void wake(int thread) {
  fibers[thread].state = State::READY;
  ready.push_back(thread);
}

static void release_block_if_all() {
  if (num_at_block == 0 || num_at_block + num_ended < num_threads) return;
  num_at_block = 0;
  votes_seen = votes;
  votes = 0;
  for (int i = 0; i < num_threads; ++i)
    if (fibers[i].state == State::AT_BLOCK) wake(i);
}

static int block_barrier(int vote) {
  fibers[current].state = State::AT_BLOCK;
  ++num_at_block;
  votes += vote;
  suspend();
  return votes_seen;
}

static void stay() {
  wake(current);
  suspend();
}

// Lets other threads of the block run now and then, in code in which threads of a GPU race on purpose.
static void maybe_yield() {
  if (is_random && order() % 4 == 0) stay();
}

static unsigned long long warp_operation(int op, unsigned mask, unsigned long long given, int from, Reduce reduce) {
  Fiber& me = fibers[current];
  int first = current / WARP * WARP, lane = current % WARP;
  if (!(mask >> lane & 1)) {
    fail("a warp operation's mask lacks the lane that calls it");
    stay();
    return 0;
  }
  me.state = State::AT_WARP;
  me.mask = mask;
  me.op = op;
  me.given = given;
  me.from = from;
  for (int i = 0; i < WARP; ++i) {
    if (!(mask >> i & 1)) continue;
    int other = first + i;
    if (other >= num_threads || fibers[other].state == State::ENDED) {
      fail("a warp operation's mask names a lane that has ended or never was");
      break;
    }
    const Fiber& fiber = fibers[other];
    if (fiber.state != State::AT_WARP || fiber.mask != mask || fiber.op != op) {
      suspend();
      return fibers[current].got;
    }
  }
  for (int i = 0; i < WARP; ++i)
    if (mask >> i & 1 && first + i < num_threads) fibers[first + i].got = reduce(&fibers[first], mask, i);
  for (int i = 0; i < WARP; ++i)
    if (mask >> i & 1 && first + i < num_threads && fibers[first + i].state == State::AT_WARP) wake(first + i);
  suspend();
  return fibers[current].got;
}

struct Tls {
  unsigned char* at;
  size_t bytes;
};

static char here;
static thread_local volatile char first_of_tls;

// Finds this library's thread-local storage, which stands for static shared memory.
static int find_tls(dl_phdr_info* info, size_t, void* out) {
  bool is_mine = false;
  size_t bytes = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    uintptr_t low = info->dlpi_addr + header.p_vaddr;
    if (header.p_type == PT_LOAD && (uintptr_t)&here >= low && (uintptr_t)&here < low + header.p_memsz) is_mine = true;
    if (header.p_type == PT_TLS) bytes = header.p_memsz;
  }
  if (!is_mine) return 0;
  *(Tls*)out = {(unsigned char*)info->dlpi_tls_data, info->dlpi_tls_data ? bytes : 0};
  return 1;
}

static void describe_deadlock() {
  std::string text = "deadlock: ";
  int at_warp = 0;
  for (int i = 0; i < num_threads; ++i) at_warp += fibers[i].state == State::AT_WARP;
  text += std::to_string(num_at_block) + " threads at __syncthreads, " + std::to_string(at_warp) + " at warp operations, " +
          std::to_string(num_ended) + " ended, of " + std::to_string(num_threads);
  fail(text);
}

static void run_block(size_t shared_bytes) {
  first_of_tls = 0;  // the storage is made when the thread first touches it
  Tls tls{nullptr, 0};
  dl_iterate_phdr(find_tls, &tls);
  if (tls.at) memset(tls.at, POISON, tls.bytes);
  memset(dynamic_shared, POISON, shared_bytes + GUARD_BYTES);
  num_at_block = num_ended = votes = 0;
  ready.clear();
  for (int i = 0; i < num_threads; ++i) wake(i);
  size_t head = 0;
  while (num_ended < num_threads && error.empty()) {
    if (head == ready.size()) {
      describe_deadlock();
      return;
    }
    if (is_random) std::swap(ready[head], ready[head + order() % (ready.size() - head)]);
    resume(ready[head++]);
    release_block_if_all();
    if (head > 4096) {
      ready.erase(ready.begin(), ready.begin() + head);
      head = 0;
    }
  }
  for (size_t i = 0; i < GUARD_BYTES; ++i)
    if (dynamic_shared[shared_bytes + i] != POISON) {
      fail("a write behind dynamic shared memory, at byte " + std::to_string(shared_bytes + i) + " of " + std::to_string(shared_bytes));
      return;
    }
}

template <class... A, size_t... I>
static void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
  kernel(*(std::remove_const_t<A>*)arguments[I]...);
}

template <class... A>
struct Call {
  void (*kernel)(A...);
  void** arguments;
  static void run(void* self) {
    auto* me = (Call*)self;
    call(me->kernel, me->arguments, std::index_sequence_for<A...>{});
  }
};

template <class... A>
static const char* launch(void (*kernel)(A...), const unsigned* grid, const unsigned* block, void** arguments, size_t shared_bytes,
                          unsigned seed) {
  Call<A...> the_call{kernel, arguments};
  body = Call<A...>::run;
  body_argument = &the_call;
  bool had_error = !error.empty();
  error.clear();
  if (!stacks || had_error) make_fibers();
  the_grid = {grid[0], grid[1], grid[2]};
  the_block = {block[0], block[1], block[2]};
  num_threads = block[0] * block[1] * block[2];
  is_random = seed != 0;
  order.seed(seed);
  size_t num_blocks = (size_t)grid[0] * grid[1] * grid[2];
  std::vector<size_t> blocks(num_blocks);
  for (size_t i = 0; i < num_blocks; ++i) blocks[i] = i;
  for (size_t i = 0; is_random && i < num_blocks; ++i) std::swap(blocks[i], blocks[i + order() % (num_blocks - i)]);
  for (size_t b : blocks) {
    the_block_at = {unsigned(b % grid[0]), unsigned(b / grid[0] % grid[1]), unsigned(b / grid[0] / grid[1])};
    run_block(shared_bytes);
    if (!error.empty()) return error.c_str();
  }
  return nullptr;
}

// Describes each parameter by a letter and its size in bytes. p: pointer, i: integer, f: float, s: any other type.
template <class... A>
static void describe(void (*)(A...), char* out) {
  ((out += sprintf(out, "%c%zu ",
                   std::is_pointer_v<A> ? 'p' : std::is_integral_v<A> ? 'i' : std::is_floating_point_v<A> ? 'f' : 's',
                   sizeof(A))),
   ...);
}

template <class T>
static unsigned long long bits_of(T value) {
  static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
  unsigned long long bits = 0;
  memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <class T>
static T from_bits(unsigned long long bits) {
  T value;
  memcpy(&value, &bits, sizeof(T));
  return value;
}

enum Op { SYNC = 1, SHUFFLE, BALLOT, ADD, MIN, MAX, AND, OR, XOR, MATCH, MIN_SIGNED, MAX_SIGNED };

static unsigned long long take(const Fiber* warp, unsigned, int lane) { return warp[warp[lane].from].given; }
static unsigned long long nothing(const Fiber*, unsigned, int) { return 0; }
static unsigned long long gather_votes(const Fiber* warp, unsigned mask, int) {
  unsigned bits = 0;
  for (int i = 0; i < WARP; ++i)
    if (mask >> i & 1 && warp[i].given) bits |= 1u << i;
  return bits;
}
static unsigned long long gather_equal(const Fiber* warp, unsigned mask, int lane) {
  unsigned bits = 0;
  for (int i = 0; i < WARP; ++i)
    if (mask >> i & 1 && warp[i].given == warp[lane].given) bits |= 1u << i;
  return bits;
}
template <int OP>
static unsigned long long fold(const Fiber* warp, unsigned mask, int) {
  bool is_first = true;
  unsigned r = 0;
  for (int i = 0; i < WARP; ++i) {
    if (!(mask >> i & 1)) continue;
    unsigned v = (unsigned)warp[i].given;
    if (is_first) r = v;
    else if (OP == ADD) r += v;
    else if (OP == MIN) r = r < v ? r : v;
    else if (OP == MAX) r = r < v ? v : r;
    else if (OP == MIN_SIGNED) r = (int)r < (int)v ? r : v;
    else if (OP == MAX_SIGNED) r = (int)r < (int)v ? v : r;
    else if (OP == AND) r &= v;
    else if (OP == OR) r |= v;
    else if (OP == XOR) r ^= v;
    is_first = false;
  }
  return r;
}

template <class T>
static T shuffle(unsigned mask, T value, int target, bool stays) {
  int lane = current % WARP;
  int from = stays ? lane : target;
  if (!(mask >> from & 1)) {
    fail("a shuffle reads a lane that its mask lacks");
    from = lane;
  }
  return from_bits<T>(warp_operation(SHUFFLE, mask, bits_of(value), from, take));
}

}  // namespace cuda_on_cpu

#define gridDim (cuda_on_cpu::the_grid)
#define blockDim (cuda_on_cpu::the_block)
#define blockIdx (cuda_on_cpu::the_block_at)
#define threadIdx (cuda_on_cpu::the_thread_at)
constexpr int warpSize = 32;

// ------------------------------------------------------------------------------------------------------------------ waiting

static inline void __syncthreads() { cuda_on_cpu::block_barrier(0); }
static inline int __syncthreads_count(int p) { return cuda_on_cpu::block_barrier(p != 0); }
static inline int __syncthreads_or(int p) { return cuda_on_cpu::block_barrier(p != 0) != 0; }
static inline int __syncthreads_and(int p) { return cuda_on_cpu::block_barrier(p == 0) == 0; }
static inline void __syncwarp(unsigned mask = 0xffffffffu) {
  cuda_on_cpu::warp_operation(cuda_on_cpu::SYNC, mask, 0, 0, cuda_on_cpu::nothing);
}
static inline void __threadfence() { cuda_on_cpu::maybe_yield(); }
static inline void __threadfence_block() { cuda_on_cpu::maybe_yield(); }
static inline void __threadfence_system() { cuda_on_cpu::maybe_yield(); }
static inline void __nanosleep(unsigned) { cuda_on_cpu::stay(); }
static inline void __trap() {
  cuda_on_cpu::fail("__trap()");
  cuda_on_cpu::stay();
}

template <class T>
static inline T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
  int lane = cuda_on_cpu::current % 32;
  return cuda_on_cpu::shuffle(mask, value, lane / width * width + (from & (width - 1)), false);
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
  int lane = cuda_on_cpu::current % 32, target = lane ^ lanes;
  return cuda_on_cpu::shuffle(mask, value, target, target >= (lane / width + 1) * width);
}
template <class T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
  int lane = cuda_on_cpu::current % 32, target = lane + (int)by;
  return cuda_on_cpu::shuffle(mask, value, target, target >= (lane / width + 1) * width);
}
template <class T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
  int lane = cuda_on_cpu::current % 32, target = lane - (int)by;
  return cuda_on_cpu::shuffle(mask, value, target, target < lane / width * width);
}
static inline unsigned __ballot_sync(unsigned mask, int p) {
  return (unsigned)cuda_on_cpu::warp_operation(cuda_on_cpu::BALLOT, mask, p != 0, 0, cuda_on_cpu::gather_votes);
}
static inline int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
static inline int __all_sync(unsigned mask, int p) { return __ballot_sync(mask, p) == mask; }
template <class T>
static inline unsigned __match_any_sync(unsigned mask, T value) {
  return (unsigned)cuda_on_cpu::warp_operation(cuda_on_cpu::MATCH, mask, cuda_on_cpu::bits_of(value), 0, cuda_on_cpu::gather_equal);
}
#define CUDA_ON_CPU_REDUCE(name, T, OP)                                                                                              \
  static inline T name(unsigned mask, T value) {                                                                                     \
    return (T)cuda_on_cpu::warp_operation(cuda_on_cpu::OP, mask, (unsigned)value, 0, cuda_on_cpu::fold<cuda_on_cpu::OP>);            \
  }
CUDA_ON_CPU_REDUCE(__reduce_add_sync, unsigned, ADD)
CUDA_ON_CPU_REDUCE(__reduce_add_sync, int, ADD)
CUDA_ON_CPU_REDUCE(__reduce_min_sync, unsigned, MIN)
CUDA_ON_CPU_REDUCE(__reduce_min_sync, int, MIN_SIGNED)
CUDA_ON_CPU_REDUCE(__reduce_max_sync, unsigned, MAX)
CUDA_ON_CPU_REDUCE(__reduce_max_sync, int, MAX_SIGNED)
CUDA_ON_CPU_REDUCE(__reduce_and_sync, unsigned, AND)
CUDA_ON_CPU_REDUCE(__reduce_or_sync, unsigned, OR)
CUDA_ON_CPU_REDUCE(__reduce_xor_sync, unsigned, XOR)

// ------------------------------------------------------------------------------------------------------------------ memory

template <class T> static inline T __ldg(const T* at) { return *at; }
template <class T> static inline T __ldca(const T* at) { return *at; }
template <class T> static inline T __ldcg(const T* at) { return *at; }
template <class T> static inline T __ldcs(const T* at) { return *at; }
template <class T> static inline T __ldlu(const T* at) { return *at; }
template <class T> static inline void __stcg(T* at, T value) { *at = value; }
template <class T> static inline void __stcs(T* at, T value) { *at = value; }
template <class T> static inline void __stwb(T* at, T value) { *at = value; }
template <class T> static inline void __stwt(T* at, T value) { *at = value; }

#define CUDA_ON_CPU_ATOMIC(name, expression)                                                            \
  template <class T> static inline T name(T* at, std::common_type_t<T> value) {                         \
    T old = *at;                                                                                        \
    *at = (T)(expression);                                                                              \
    cuda_on_cpu::maybe_yield();                                                                         \
    return old;                                                                                         \
  }
CUDA_ON_CPU_ATOMIC(atomicAdd, old + value)
CUDA_ON_CPU_ATOMIC(atomicSub, old - value)
CUDA_ON_CPU_ATOMIC(atomicMax, old < value ? value : old)
CUDA_ON_CPU_ATOMIC(atomicMin, value < old ? value : old)
CUDA_ON_CPU_ATOMIC(atomicExch, value)
CUDA_ON_CPU_ATOMIC(atomicAnd, old & value)
CUDA_ON_CPU_ATOMIC(atomicOr, old | value)
CUDA_ON_CPU_ATOMIC(atomicXor, old ^ value)
CUDA_ON_CPU_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
CUDA_ON_CPU_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1)
template <class T> static inline T atomicCAS(T* at, std::common_type_t<T> compare, std::common_type_t<T> value) {
  T old = *at;
  if (old == compare) *at = value;
  cuda_on_cpu::maybe_yield();
  return old;
}

// ------------------------------------------------------------------------------------------------------------------ arithmetic

template <class A, class B> static inline std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmin((T)a, (T)b);
  return (T)a < (T)b ? (T)a : (T)b;
}
template <class A, class B> static inline std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmax((T)a, (T)b);
  return (T)a < (T)b ? (T)b : (T)a;
}
using std::isfinite;
using std::isinf;
using std::isnan;
static inline float __frsqrt_rn(float x) { return 1.0f / std::sqrt(x); }
static inline float __fsqrt_rn(float x) { return std::sqrt(x); }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }

// These are macros, because the C library already declares some of the names as functions.
#define rsqrtf(x) (1.0f / std::sqrt((float)(x)))
#define __expf(x) (std::exp((float)(x)))
#define __exp10f(x) (std::pow(10.0f, (float)(x)))
#define __logf(x) (std::log((float)(x)))
#define __log2f(x) (std::log2((float)(x)))
#define __log10f(x) (std::log10((float)(x)))
#define __powf(x, y) (std::pow((float)(x), (float)(y)))
#define __sinf(x) (std::sin((float)(x)))
#define __cosf(x) (std::cos((float)(x)))

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline unsigned __brev(unsigned x) {
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= (x >> i & 1u) << (31 - i);
  return r;
}
static inline int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}
static inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned n) {
  return (unsigned)(((unsigned long long)hi << 32 | lo) << (n & 31) >> 32);
}
static inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned n) {
  return (unsigned)(((unsigned long long)hi << 32 | lo) >> (n & 31));
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  unsigned long long both = (unsigned long long)b << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) {
    unsigned s = selector >> (4 * i) & 15, byte = (unsigned)(both >> (8 * (s & 7)) & 255);
    r |= (s & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * i);
  }
  return r;
}
static inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i) c += (int)(signed char)(a >> (8 * i)) * (int)(signed char)(b >> (8 * i));
  return c;
}
static inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  for (int i = 0; i < 4; ++i) c += (a >> (8 * i) & 255u) * (b >> (8 * i) & 255u);
  return c;
}

template <class To, class From> static inline To __bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &value, sizeof(to));
  return to;
}
static inline int __float_as_int(float x) { return __bits_as<int>(x); }
static inline unsigned __float_as_uint(float x) { return __bits_as<unsigned>(x); }
static inline float __int_as_float(int x) { return __bits_as<float>(x); }
static inline float __uint_as_float(unsigned x) { return __bits_as<float>(x); }
static inline long long __double_as_longlong(double x) { return __bits_as<long long>(x); }
static inline double __longlong_as_double(long long x) { return __bits_as<double>(x); }

// As on the device, values out of range are clamped, and NaN becomes 0.
static inline int __clamped_int(double x) {
  return x != x ? 0 : x >= 2147483647.0 ? 2147483647 : x <= -2147483648.0 ? -2147483647 - 1 : (int)x;
}
static inline unsigned __clamped_uint(double x) { return x != x || x <= 0 ? 0u : x >= 4294967295.0 ? 4294967295u : (unsigned)x; }
static inline int __float2int_rn(float x) { return __clamped_int(std::nearbyint(x)); }
static inline int __float2int_rz(float x) { return __clamped_int(std::trunc(x)); }
static inline int __float2int_rd(float x) { return __clamped_int(std::floor(x)); }
static inline int __float2int_ru(float x) { return __clamped_int(std::ceil(x)); }
static inline unsigned __float2uint_rn(float x) { return __clamped_uint(std::nearbyint(x)); }
static inline unsigned __float2uint_rz(float x) { return __clamped_uint(std::trunc(x)); }
static inline float __int2float_rn(int x) { return (float)x; }
static inline float __uint2float_rn(unsigned x) { return (float)x; }

// ------------------------------------------------------------------------------------------------------------------ 16-bit floats

struct __half {
  unsigned short x;
};
struct __nv_bfloat16 {
  unsigned short x;
};

static inline __half __ushort_as_half(unsigned short x) { return {x}; }
static inline unsigned short __half_as_ushort(__half h) { return h.x; }
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) { return {x}; }
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 h) { return h.x; }
static inline float __half2float(__half h) {
  unsigned sign = (h.x & 0x8000u) << 16, exponent = h.x >> 10 & 31, mantissa = h.x & 1023;
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | mantissa << 13);
  if (exponent) return __uint_as_float(sign | (exponent + 112) << 23 | mantissa << 13);
  return __uint_as_float(sign | __float_as_uint((float)mantissa * 0x1p-24f));
}
static inline __half __float2half_rn(float f) {
  unsigned bits = __float_as_uint(f), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return {0x7fff};
  if (size >= 0x477ff000u) return {(unsigned short)(sign | 0x7c00u)};
  if (size < 0x38800000u) return {(unsigned short)(sign | (unsigned)std::nearbyint(std::fabs(f) * 0x1p24f))};
  unsigned rounded = size + 0xfffu + (size >> 13 & 1);
  return {(unsigned short)(sign | (rounded - 0x38000000u) >> 13)};
}
static inline __half __float2half(float f) { return __float2half_rn(f); }
static inline float __bfloat162float(__nv_bfloat16 h) { return __uint_as_float((unsigned)h.x << 16); }
static inline __nv_bfloat16 __float2bfloat16_rn(float f) {
  unsigned bits = __float_as_uint(f);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
  return {(unsigned short)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16)};
}
static inline __nv_bfloat16 __float2bfloat16(float f) { return __float2bfloat16_rn(f); }
