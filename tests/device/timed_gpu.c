// A CUDA driver without a GPU, whose copies take time: a library with the symbols that
// `hotkv_server/device/driver.py` calls.
//
// Always true:
// - Work of a stream runs on the stream's thread when the stream reaches it, never inside the call
//   that submits it.
// - A device copies `bytes_per_s` in each direction. Streams share a direction. Waiting takes no
//   processor time.
// - While `cuMemHostRegister` runs, every other call waits.
// - Closing and freeing device memory wait for all streams of the device.
// - A lost device moves no further byte, and each call with its context fails; other devices go on.
// - Device memory is host memory at other addresses. Handles are those of
//   `tests.doubles.device_memory`.
// - Memory that is mapped into ranges is a memfd, whose name has its place and how it may be
//   exported; a descriptor of it is a duplicate of the memfd's.
//
// `timed_gpu.py` shares the struct `Control` with the library, reads the number of calls there, and
// makes them fail or hang.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201 };
enum { INVALID_HANDLE = 400, NOT_READY = 600, ILLEGAL_ADDRESS = 700, REGISTERED = 712 };
enum { MAX_CALLS = 64, MAX_DEVICES = 16, MAX_RANGES = 4096, MAX_STREAMS = 256 };
enum { BACKINGS, RESERVED, MAPPED, NUM_HELD };
enum { POSIX_DESCRIPTOR = 1, GRANULARITY = 4096, MAX_RESERVED = 256, MAX_MAPPED = 4096 };
enum { LOAD, STORE, INSIDE, NUM_WAYS };  // directions; INSIDE: between addresses of one device
enum { HOST = -1, PAGEABLE = -2, CROSSING = -3 };  // in place of a device

static const int64_t PIECE_NS = 2000, POLL_NS = 50000;
static const uint64_t MARKS_BYTES = 4096;  // most that a copy of marks has
static const double INSIDE_FACTOR = 20;  // copies inside the device over copies across PCIe

// ------------------------------------------------------------------------------ What tests control

typedef struct {
  char name[40];
  int64_t num_calls;
  int64_t skip, fail, status;  // after `skip` calls, the next `fail` return `status`
  int64_t is_held;             // while it is set, calls hang
} Call;

typedef struct {
  int64_t num_devices;
  double bytes_per_s;
  int64_t call_ns;      // processor time of submitting a copy
  int64_t copy_ns;      // and of each copy of a batch
  int64_t register_ns;  // time of a registration, during which the driver is locked
  int64_t moved_bytes;  // longer copies only take their time
  // Submission of the first copy, and end of the last, since the test wrote 0; without those that
  // read marks.
  int64_t first_ns[NUM_WAYS], last_ns[NUM_WAYS];
  int64_t held[NUM_HELD];  // of virtual memory
  Call calls[MAX_CALLS];
  // By device:
  int64_t places[MAX_DEVICES];    // its number in the machine, as in UUIDs and handles
  int64_t lost[MAX_DEVICES];      // what every call returns; 0 while the device works
  int64_t is_hung[MAX_DEVICES];   // while it is set, calls and work hang
  int64_t num_hung[MAX_DEVICES];  // of these calls and pieces of work, so far
} Control;

static Control* control;
static pthread_mutex_t driver = PTHREAD_MUTEX_INITIALIZER, orders = PTHREAD_MUTEX_INITIALIZER;

int timed_open(const char* path) {
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return INVALID_VALUE;
  void* at = mmap(NULL, sizeof(Control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (at == MAP_FAILED) return OUT_OF_MEMORY;
  control = at;
  return OK;
}

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static void sleep_until(int64_t ns) {
  struct timespec t = {ns / 1000000000ll, ns % 1000000000ll};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL)) {
  }
}

static void spin(int64_t ns) {
  for (int64_t end = now_ns() + ns; now_ns() < end;) {
  }
}

static Call* call_named(const char* name) {
  for (int i = 0; i < MAX_CALLS; ++i)
    if (!strcmp(control->calls[i].name, name)) return &control->calls[i];
  fprintf(stderr, "timed_gpu: the control has no call %s\n", name);
  abort();
}

static int enter(Call** known, const char* name) {
  if (!*known) *known = call_named(name);
  Call* call = *known;
  __atomic_add_fetch(&call->num_calls, 1, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(&call->is_held, __ATOMIC_SEQ_CST)) sleep_until(now_ns() + 1000000);
  pthread_mutex_lock(&driver);
  pthread_mutex_unlock(&driver);
  int status = OK;
  pthread_mutex_lock(&orders);
  if (call->fail > 0) {
    if (call->skip > 0) --call->skip;
    else {
      --call->fail;
      status = (int)call->status;
    }
  }
  pthread_mutex_unlock(&orders);
  return status;
}

#define ENTER()                            \
  do {                                     \
    static Call* known;                    \
    int status = enter(&known, __func__);  \
    if (status != OK) return status;       \
  } while (0)

static __thread int current = -1;  // device of the thread's context

static int64_t loss_of(int device) {
  return __atomic_load_n(&control->lost[device], __ATOMIC_SEQ_CST);
}

static void wait_while_hung(int device) {
  if (!__atomic_load_n(&control->is_hung[device], __ATOMIC_SEQ_CST)) return;
  __atomic_add_fetch(&control->num_hung[device], 1, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(&control->is_hung[device], __ATOMIC_SEQ_CST))
    sleep_until(now_ns() + 1000000);
}

#define ENTER_DEVICE()                           \
  do {                                           \
    ENTER();                                     \
    if (current < 0) return INVALID_CONTEXT;     \
    wait_while_hung(current);                    \
    if (loss_of(current)) return (int)loss_of(current); \
  } while (0)

// ------------------------------------------------------------------------------------------ Memory
// Always true: ranges do not overlap.

typedef struct {
  uint64_t start, num_bytes;
  int device;  // HOST for pinned host memory
  int num_opened;
  char handle[64];
} Range;

static Range ranges[MAX_RANGES];
static int num_ranges;
static pthread_mutex_t ranges_lock = PTHREAD_MUTEX_INITIALIZER;

static int overlaps(const Range* range, uint64_t start, uint64_t num_bytes) {
  return start < range->start + range->num_bytes && range->start < start + num_bytes;
}

static int keep_range(uint64_t start, uint64_t num_bytes, int device, const char* handle) {
  int status = OK;
  pthread_mutex_lock(&ranges_lock);
  for (int i = 0; i < num_ranges; ++i)
    if (overlaps(&ranges[i], start, num_bytes)) status = REGISTERED;
  if (status == OK && num_ranges == MAX_RANGES) status = OUT_OF_MEMORY;
  if (status == OK) {
    Range* range = &ranges[num_ranges++];
    *range = (Range){.start = start, .num_bytes = num_bytes, .device = device, .num_opened = 1};
    if (handle) memcpy(range->handle, handle, 64);
  }
  pthread_mutex_unlock(&ranges_lock);
  return status;
}

// Ends one use of the range that begins at `start`. Returns its bytes after the last use, 0 if
// others use it, -1 without such a range.
static int64_t drop_range(uint64_t start, int device) {
  int64_t num_bytes = -1;
  pthread_mutex_lock(&ranges_lock);
  for (int i = 0; i < num_ranges; ++i) {
    if (ranges[i].start != start || ranges[i].device != device) continue;
    num_bytes = 0;
    if (--ranges[i].num_opened == 0) {
      num_bytes = (int64_t)ranges[i].num_bytes;
      ranges[i] = ranges[--num_ranges];
    }
    break;
  }
  pthread_mutex_unlock(&ranges_lock);
  return num_bytes;
}

static int mapped_owner(uint64_t start, uint64_t num_bytes, Range* found);

// The device of the memory, HOST, PAGEABLE or CROSSING. `found`: the whole range, may be NULL.
static int owner_of(uint64_t start, uint64_t num_bytes, Range* found) {
  int owner = mapped_owner(start, num_bytes, found);
  if (owner != PAGEABLE) return owner;
  pthread_mutex_lock(&ranges_lock);
  for (int i = 0; i < num_ranges; ++i) {
    if (!overlaps(&ranges[i], start, num_bytes)) continue;
    uint64_t end = ranges[i].start + ranges[i].num_bytes;
    owner = ranges[i].start <= start && start + num_bytes <= end ? ranges[i].device : CROSSING;
    if (found) *found = ranges[i];
    break;
  }
  pthread_mutex_unlock(&ranges_lock);
  return owner;
}

static void* map_pages(uint64_t num_bytes, int fd) {
  int flags = fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* at = mmap(NULL, num_bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  return at == MAP_FAILED ? NULL : at;
}

// The memory of another process, mapped; NULL if the handle is not of this kind or its owner has
// ended.
static void* map_handle(const char* handle, const char* magic, uint64_t* num_bytes, int* device) {
  uint32_t pid;
  int32_t number;
  uint64_t inode;
  memcpy(&pid, handle + 8, 4);
  memcpy(&number, handle + 12, 4);
  memcpy(&inode, handle + 16, 8);
  memcpy(num_bytes, handle + 24, 8);
  memcpy(device, handle + 32, 4);
  if (memcmp(handle, magic, 8)) return NULL;
  char path[64];
  snprintf(path, sizeof path, "/proc/%u/fd/%d", pid, number);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return NULL;
  struct stat state;
  void* at = NULL;
  if (!fstat(fd, &state) && state.st_ino == inode && (uint64_t)state.st_size == *num_bytes)
    at = map_pages(*num_bytes, fd);
  close(fd);
  return at;
}

// ---------------------------------------------------------------------------------- Virtual memory
// Always true: a backing is closed after its last reference: a handle or a mapping. A mapping lies
// in one reservation, and overlaps no other.

typedef struct {
  int fd, device, handle_types;
  int num_references;
  uint64_t num_bytes;
} Backing;

typedef struct {
  uint64_t start, num_bytes;
} Reserved;

typedef struct {
  uint64_t start, num_bytes;
  Backing* backing;
  int is_accessible;
} Mapped;

static Reserved reserved[MAX_RESERVED];
static Mapped mapped[MAX_MAPPED];  // in the order of addresses
static int num_reserved, num_mapped;
static pthread_mutex_t virtual_lock = PTHREAD_MUTEX_INITIALIZER;

static void count_held(int what, int by) {
  __atomic_add_fetch(&control->held[what], by, __ATOMIC_SEQ_CST);
}

static Backing* keep_backing(int fd, uint64_t num_bytes, int device, int handle_types) {
  Backing* backing = malloc(sizeof *backing);
  *backing = (Backing){fd, device, handle_types, 1, num_bytes};
  count_held(BACKINGS, 1);
  return backing;
}

static void drop_backing(Backing* backing) {
  if (--backing->num_references) return;
  close(backing->fd);
  free(backing);
  count_held(BACKINGS, -1);
}

// As `owner_of`. `found`: the first mapping.
static int mapped_owner(uint64_t start, uint64_t num_bytes, Range* found) {
  int owner = PAGEABLE;
  uint64_t at = start;
  pthread_mutex_lock(&virtual_lock);
  for (int i = 0; i < num_mapped && at < start + num_bytes; ++i) {
    Mapped* one = &mapped[i];
    if (at < one->start || at >= one->start + one->num_bytes) continue;
    if (found && at == start)
      *found = (Range){.start = one->start, .num_bytes = one->num_bytes};
    int fits = at == start || owner == one->backing->device;
    owner = fits && one->is_accessible ? one->backing->device : CROSSING;
    if (owner == CROSSING) break;
    at = one->start + one->num_bytes;
  }
  pthread_mutex_unlock(&virtual_lock);
  return at > start && at < start + num_bytes ? CROSSING : owner;
}

// ------------------------------------------------------------------------------ Streams and events

typedef struct Event {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  uint64_t recorded, passed;
  volatile uint64_t* shared;  // of another process: number of records, number passed
} Event;

typedef struct {
  uint64_t dst, src, num_bytes;
} Copy;

typedef struct Item {
  struct Item* next;
  Event* event;     // for a record
  uint64_t number;  // of the record
  uint64_t table;   // of a kernel: int64 [3, num_copies]
  uint64_t num_copies;
  int64_t given_ns;
  int way;
  Copy copies[];
} Item;

typedef struct Stream {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  Item *first, *last;
  uint64_t num_pending;
  int64_t end_ns;  // of the work that its thread has reached
  int device;
} Stream;

static Stream* streams[MAX_STREAMS];
static int num_streams;
static int64_t free_ns[MAX_DEVICES][NUM_WAYS];  // when a direction has copied what was begun
static pthread_mutex_t devices_lock = PTHREAD_MUTEX_INITIALIZER;

// When a copy ends. It begins when it is given, its stream has reached it and its direction is free,
// even if the stream's thread wakes up late.
static int64_t end_of(Stream* stream, Item* item, uint64_t num_bytes) {
  double rate = control->bytes_per_s * (item->way == INSIDE ? INSIDE_FACTOR : 1);
  pthread_mutex_lock(&devices_lock);
  int64_t* is_free_ns = &free_ns[stream->device][item->way];
  int64_t begin = item->given_ns > stream->end_ns ? item->given_ns : stream->end_ns;
  if (*is_free_ns > begin) begin = *is_free_ns;
  *is_free_ns = stream->end_ns = begin + PIECE_NS + (int64_t)(num_bytes / rate * 1e9);
  pthread_mutex_unlock(&devices_lock);
  return stream->end_ns;
}

// The direction of a copy on the device; -1 if CUDA would refuse it. `is_pageable`: set if host
// memory is not pinned.
static int way_of(int device, Copy copy, int* is_pageable) {
  int dst = owner_of(copy.dst, copy.num_bytes, NULL);
  int src = owner_of(copy.src, copy.num_bytes, NULL);
  if (dst == CROSSING || src == CROSSING || (dst < 0 && src < 0)) return -1;
  if ((dst >= 0 && dst != device) || (src >= 0 && src != device)) return -1;
  if (dst == PAGEABLE || src == PAGEABLE) *is_pageable = 1;
  return dst < 0 ? STORE : src < 0 ? LOAD : INSIDE;
}

static void move(Copy copy) {
  if (copy.num_bytes <= (uint64_t)control->moved_bytes)
    memcpy((void*)copy.dst, (void*)copy.src, copy.num_bytes);
}

static void stamp_once(int64_t* at, int64_t ns) {
  if (!__atomic_load_n(at, __ATOMIC_SEQ_CST)) __atomic_store_n(at, ns, __ATOMIC_SEQ_CST);
}

static void run_copies(Stream* stream, Item* item) {
  uint64_t sum = 0, count = item->num_copies;
  const int64_t* table = (const int64_t*)item->table;
  for (uint64_t i = 0; i < count; ++i) {
    if (table) item->copies[i] = (Copy){table[i], table[count + i], table[2 * count + i]};
    sum += item->copies[i].num_bytes;
  }
  int is_pageable = 0;
  if (table && count) item->way = way_of(stream->device, item->copies[0], &is_pageable);
  wait_while_hung(stream->device);
  if (item->way < 0 || loss_of(stream->device)) return;
  int64_t end = end_of(stream, item, sum);
  for (uint64_t i = 0; i < count; ++i) move(item->copies[i]);
  sleep_until(end);
  if (sum > MARKS_BYTES) {
    stamp_once(&control->first_ns[item->way], item->given_ns);
    __atomic_store_n(&control->last_ns[item->way], end, __ATOMIC_SEQ_CST);
  }
}

static void pass(Event* event, uint64_t number) {
  pthread_mutex_lock(&event->lock);
  if (number > event->passed) event->passed = number;
  pthread_cond_broadcast(&event->changed);
  pthread_mutex_unlock(&event->lock);
}

static void* run_stream(void* argument) {
  Stream* stream = argument;
  for (;;) {
    pthread_mutex_lock(&stream->lock);
    while (!stream->first) pthread_cond_wait(&stream->changed, &stream->lock);
    Item* item = stream->first;
    stream->first = item->next;
    pthread_mutex_unlock(&stream->lock);
    if (item->event) pass(item->event, item->number);
    else run_copies(stream, item);
    free(item);
    pthread_mutex_lock(&stream->lock);
    --stream->num_pending;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
  }
  return NULL;
}

static void push(Stream* stream, Item* item) {
  item->given_ns = now_ns();
  item->next = NULL;
  pthread_mutex_lock(&stream->lock);
  if (stream->first) stream->last->next = item;
  else stream->first = item;
  stream->last = item;
  ++stream->num_pending;
  pthread_cond_broadcast(&stream->changed);
  pthread_mutex_unlock(&stream->lock);
}

static void drain(Stream* stream) {
  pthread_mutex_lock(&stream->lock);
  while (stream->num_pending) pthread_cond_wait(&stream->changed, &stream->lock);
  pthread_mutex_unlock(&stream->lock);
}

static void drain_device(int device) {
  for (int i = 0; i < __atomic_load_n(&num_streams, __ATOMIC_SEQ_CST); ++i)
    if (streams[i]->device == device) drain(streams[i]);
}

static Item* new_item(uint64_t num_copies) {
  Item* item = calloc(1, sizeof(Item) + num_copies * sizeof(Copy));
  item->num_copies = num_copies;
  return item;
}

// ------------------------------------------------------------------------------ The driver's calls

int cuInit(unsigned flags) {
  ENTER();
  return OK;
}
int cuGetErrorName(int error, const char** text) {
  *text = error == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS"
          : error == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE"
                                   : NULL;
  return OK;
}
int cuGetErrorString(int error, const char** text) {
  *text = error == ILLEGAL_ADDRESS ? "an illegal memory access was encountered"
          : error == INVALID_VALUE ? "invalid argument"
                                   : NULL;
  return OK;
}

int cuDeviceGetCount(int* count) {
  ENTER();
  *count = (int)control->num_devices;
  return OK;
}
int cuDeviceGet(int* device, int number) {
  ENTER();
  *device = number;
  return OK;
}
int cuDeviceGetName(char* name, int length, int device) {
  ENTER();
  snprintf(name, length, "Timed %d", device);
  return OK;
}
int cuDeviceGetPCIBusId(char* id, int length, int device) {
  ENTER();
  snprintf(id, length, "0000:%02x:1f.7", 0xf0 + device);
  return OK;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  ENTER();
  *value = attribute == 91;
  return OK;
}
int cuDeviceGetUuid_v2(char* uuid, int device) {
  ENTER();
  memcpy(uuid, "hotkv-fake-gpu", 14);
  uuid[14] = (char)(control->places[device] >> 8);
  uuid[15] = (char)control->places[device];
  return OK;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  ENTER();
  *context = (void*)(intptr_t)(device + 1);
  return OK;
}
int cuCtxSetCurrent(void* context) {
  ENTER();
  current = (int)(intptr_t)context - 1;
  return OK;
}

int cuStreamCreateWithPriority(Stream** made, unsigned flags, int priority) {
  ENTER_DEVICE();
  Stream* stream = calloc(1, sizeof *stream);
  pthread_mutex_init(&stream->lock, NULL);
  pthread_cond_init(&stream->changed, NULL);
  stream->device = current;
  pthread_mutex_lock(&devices_lock);
  int is_full = num_streams == MAX_STREAMS;
  if (!is_full) {
    streams[num_streams] = stream;
    __atomic_add_fetch(&num_streams, 1, __ATOMIC_SEQ_CST);
  }
  pthread_mutex_unlock(&devices_lock);
  pthread_t thread;
  if (is_full || pthread_create(&thread, NULL, run_stream, stream)) return OUT_OF_MEMORY;
  pthread_detach(thread);
  *made = stream;
  return OK;
}

static Event* new_event(void) {
  Event* event = calloc(1, sizeof *event);
  pthread_mutex_init(&event->lock, NULL);
  pthread_cond_init(&event->changed, NULL);
  return event;
}
static int has_passed(Event* event) {
  return event->shared ? event->shared[1] >= event->shared[0] : event->passed >= event->recorded;
}
int cuEventCreate(Event** event, unsigned flags) {
  ENTER_DEVICE();
  *event = new_event();
  return OK;
}
int cuEventDestroy_v2(Event* event) {
  ENTER_DEVICE();
  if (event->shared) munmap((void*)event->shared, 16);
  event->shared = NULL;
  return OK;  // its memory is kept: a stream may still have a record of it
}
int cuEventRecord(Event* event, Stream* stream) {
  ENTER_DEVICE();
  Item* item = new_item(0);
  pthread_mutex_lock(&event->lock);
  item->event = event;
  item->number = ++event->recorded;
  pthread_mutex_unlock(&event->lock);
  push(stream, item);
  return OK;
}
int cuEventQuery(Event* event) {
  ENTER_DEVICE();
  pthread_mutex_lock(&event->lock);
  int passed = has_passed(event);
  pthread_mutex_unlock(&event->lock);
  return passed ? OK : NOT_READY;
}
int cuEventSynchronize(Event* event) {
  ENTER_DEVICE();
  pthread_mutex_lock(&event->lock);
  uint64_t number = event->recorded;
  while (!event->shared && event->passed < number) pthread_cond_wait(&event->changed, &event->lock);
  pthread_mutex_unlock(&event->lock);
  while (event->shared && !has_passed(event) && !loss_of(current))
    sleep_until(now_ns() + POLL_NS);
  return (int)loss_of(current);
}

int cuMemcpyAsync(uint64_t dst, uint64_t src, size_t num_bytes, Stream* stream) {
  ENTER_DEVICE();
  Item* item = new_item(1);
  int is_pageable = 0;
  item->copies[0] = (Copy){dst, src, num_bytes};
  item->way = way_of(stream->device, item->copies[0], &is_pageable);
  if (item->way < 0) {
    free(item);
    return INVALID_VALUE;
  }
  push(stream, item);
  spin(control->call_ns);
  if (is_pageable) drain(stream);
  return OK;
}
int cuMemcpyBatchAsync_v2(uint64_t* dst, uint64_t* src, size_t* num_bytes, size_t count,
                          void* attributes, size_t* at, size_t num_attributes, Stream* stream) {
  ENTER_DEVICE();
  Item* item = new_item(count);
  int is_pageable = 0;
  for (size_t i = 0; i < count; ++i) {
    item->copies[i] = (Copy){dst[i], src[i], num_bytes[i]};
    item->way = way_of(stream->device, item->copies[i], &is_pageable);
    if (item->way < 0 || is_pageable || num_bytes[i] == 0) {
      free(item);
      return INVALID_VALUE;
    }
  }
  push(stream, item);
  spin(control->call_ns + control->copy_ns * (int64_t)count);
  return OK;
}
int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared_bytes, Stream* stream, void** parameters,
                   void** extra) {
  ENTER_DEVICE();
  Item* item = new_item(*(uint64_t*)parameters[1]);
  item->table = *(uint64_t*)parameters[0];
  item->way = -1;
  push(stream, item);
  spin(control->call_ns);
  return OK;
}

int cuMemAlloc_v2(uint64_t* address, size_t num_bytes) {
  ENTER_DEVICE();
  *address = (uint64_t)map_pages(num_bytes, -1);
  return *address ? keep_range(*address, num_bytes, current, NULL) : OUT_OF_MEMORY;
}
int cuMemFree_v2(uint64_t address) {
  ENTER_DEVICE();
  drain_device(current);
  int64_t num_bytes = drop_range(address, current);
  if (num_bytes > 0) munmap((void*)address, num_bytes);
  return num_bytes < 0 ? INVALID_VALUE : OK;
}
// Of the tests' engines.
int cuMemsetD8_v2(uint64_t address, unsigned char value, size_t num_bytes) {
  memset((void*)address, value, num_bytes);
  return OK;
}
int cuMemcpyDtoH_v2(void* dst, uint64_t src, size_t num_bytes) {
  memcpy(dst, (void*)src, num_bytes);
  return OK;
}
int cuCtxSynchronize(void) { return OK; }
int cuMemGetAddressRange_v2(uint64_t* start, size_t* num_bytes, uint64_t address) {
  ENTER_DEVICE();
  Range range;
  if (owner_of(address, 1, &range) < 0) return INVALID_VALUE;
  *start = range.start;
  *num_bytes = range.num_bytes;
  return OK;
}
int cuPointerGetAttribute(void* value, int attribute, uint64_t address) {
  ENTER_DEVICE();
  *(int*)value = owner_of(address, 1, NULL);
  return OK;
}
int cuMemHostAlloc(void** address, size_t num_bytes, unsigned flags) {
  ENTER_DEVICE();
  *address = map_pages(num_bytes, -1);
  return *address ? keep_range((uint64_t)*address, num_bytes, HOST, NULL) : OUT_OF_MEMORY;
}
int cuMemFreeHost(void* address) {
  ENTER_DEVICE();
  int64_t num_bytes = drop_range((uint64_t)address, HOST);
  if (num_bytes > 0) munmap(address, num_bytes);
  return num_bytes < 0 ? INVALID_VALUE : OK;
}
int cuMemHostRegister_v2(void* address, size_t num_bytes, unsigned flags) {
  ENTER_DEVICE();
  pthread_mutex_lock(&driver);
  if (control->register_ns) sleep_until(now_ns() + control->register_ns);
  pthread_mutex_unlock(&driver);
  return keep_range((uint64_t)address, num_bytes, HOST, NULL);
}
int cuMemHostUnregister(void* address) {
  ENTER_DEVICE();
  return drop_range((uint64_t)address, HOST) < 0 ? INVALID_VALUE : OK;
}

typedef struct {
  char bytes[64];
} Handle;

int cuIpcOpenMemHandle_v2(uint64_t* address, Handle handle, unsigned flags) {
  ENTER_DEVICE();
  *address = 0;
  pthread_mutex_lock(&ranges_lock);
  for (int i = 0; i < num_ranges && !*address; ++i)
    if (ranges[i].device == current && !memcmp(ranges[i].handle, handle.bytes, 64)) {
      ++ranges[i].num_opened;
      *address = ranges[i].start;
    }
  pthread_mutex_unlock(&ranges_lock);
  if (*address) return OK;
  uint64_t num_bytes;
  int device;
  void* at = map_handle(handle.bytes, "hkv-mem", &num_bytes, &device);
  if (!at || device != control->places[current]) {
    if (at) munmap(at, num_bytes);
    return at ? INVALID_CONTEXT : INVALID_HANDLE;
  }
  *address = (uint64_t)at;
  return keep_range(*address, num_bytes, current, handle.bytes);
}
int cuIpcCloseMemHandle(uint64_t address) { return cuMemFree_v2(address); }
int cuIpcOpenEventHandle(Event** event, Handle handle) {
  ENTER_DEVICE();
  uint64_t num_bytes;
  int device;
  void* at = map_handle(handle.bytes, "hkv-evt", &num_bytes, &device);
  if (!at) return INVALID_HANDLE;
  *event = new_event();
  (*event)->shared = at;
  return OK;
}

// cuMemCreate and all that belongs to it. A handle is the address of its backing.

typedef struct {
  int type, handle_types, location_type, device;
  void* metadata;
  unsigned char flags[8];
} Properties;

typedef struct {
  int location_type, device, access;
} Access;

int cuMemCreate(Backing** backing, size_t num_bytes, const Properties* made, uint64_t flags) {
  ENTER_DEVICE();
  if (!num_bytes || num_bytes % GRANULARITY) return INVALID_VALUE;
  char name[64];
  snprintf(name, sizeof name, "hotkv-device-backing-%d-%d", (int)control->places[made->device],
           made->handle_types);
  int fd = memfd_create(name, MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, num_bytes)) return OUT_OF_MEMORY;
  *backing = keep_backing(fd, num_bytes, made->device, made->handle_types);
  return OK;
}
int cuMemRelease(Backing* backing) {
  ENTER();
  pthread_mutex_lock(&virtual_lock);
  drop_backing(backing);
  pthread_mutex_unlock(&virtual_lock);
  return OK;
}
int cuMemExportToShareableHandle(int* fd, Backing* backing, int kind, uint64_t flags) {
  ENTER();
  if (kind != POSIX_DESCRIPTOR || !(backing->handle_types & kind)) return INVALID_VALUE;
  *fd = dup(backing->fd);
  return *fd < 0 ? OUT_OF_MEMORY : OK;
}
int cuMemImportFromShareableHandle(Backing** backing, void* given, int kind) {
  ENTER();
  char link[64], path[96];
  int fd = (int)(intptr_t)given, place, device = 0, handle_types;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  struct stat state;
  if (length < 0 || kind != POSIX_DESCRIPTOR) return INVALID_VALUE;
  path[length] = 0;
  if (sscanf(path, "/memfd:hotkv-device-backing-%d-%d", &place, &handle_types) != 2)
    return INVALID_VALUE;
  while (device < control->num_devices && control->places[device] != place) ++device;
  if (device == control->num_devices) return INVALID_VALUE;
  if (fstat(fd, &state) || (fd = fcntl(fd, F_DUPFD_CLOEXEC, 0)) < 0) return OUT_OF_MEMORY;
  *backing = keep_backing(fd, state.st_size, device, handle_types);
  return OK;
}
int cuMemRetainAllocationHandle(Backing** backing, void* address) {
  ENTER();
  *backing = NULL;
  uint64_t at = (uint64_t)address;
  pthread_mutex_lock(&virtual_lock);
  for (int i = 0; i < num_mapped && !*backing; ++i)
    if (mapped[i].start <= at && at < mapped[i].start + mapped[i].num_bytes) {
      *backing = mapped[i].backing;
      ++(*backing)->num_references;
    }
  pthread_mutex_unlock(&virtual_lock);
  return *backing ? OK : INVALID_VALUE;
}
int cuMemGetAllocationPropertiesFromHandle(Properties* made, Backing* backing) {
  ENTER();
  *made = (Properties){.type = 1, .location_type = 1, .device = backing->device,
                       .handle_types = backing->handle_types};
  return OK;
}
int cuMemAddressReserve(uint64_t* address, size_t num_bytes, size_t alignment, uint64_t wanted,
                        uint64_t flags) {
  ENTER_DEVICE();
  void* at = mmap(NULL, num_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return OUT_OF_MEMORY;
  pthread_mutex_lock(&virtual_lock);
  int is_full = num_reserved == MAX_RESERVED;
  if (!is_full) reserved[num_reserved++] = (Reserved){(uint64_t)at, num_bytes};
  pthread_mutex_unlock(&virtual_lock);
  if (is_full) return OUT_OF_MEMORY;
  count_held(RESERVED, 1);
  *address = (uint64_t)at;
  return OK;
}
int cuMemAddressFree(uint64_t address, size_t num_bytes) {
  ENTER_DEVICE();
  int status = INVALID_VALUE;
  pthread_mutex_lock(&virtual_lock);
  for (int i = 0; i < num_mapped; ++i)
    if (mapped[i].start >= address && mapped[i].start < address + num_bytes) num_bytes = 0;
  for (int i = 0; i < num_reserved; ++i) {
    if (reserved[i].start != address || reserved[i].num_bytes != num_bytes) continue;
    munmap((void*)address, num_bytes);
    reserved[i] = reserved[--num_reserved];
    count_held(RESERVED, -1);
    status = OK;
  }
  pthread_mutex_unlock(&virtual_lock);
  return status;
}
int cuMemMap(uint64_t address, size_t num_bytes, size_t offset, Backing* backing, uint64_t flags) {
  ENTER_DEVICE();
  uint64_t end = address + num_bytes;
  int is_inside = 0;
  pthread_mutex_lock(&virtual_lock);
  for (int i = 0; i < num_reserved; ++i)
    is_inside |= reserved[i].start <= address && end <= reserved[i].start + reserved[i].num_bytes;
  for (int i = 0; i < num_mapped; ++i)
    if (mapped[i].start < end && address < mapped[i].start + mapped[i].num_bytes) is_inside = 0;
  int status = is_inside && !offset && num_bytes == backing->num_bytes ? OK : INVALID_VALUE;
  if (status == OK && num_mapped == MAX_MAPPED) status = OUT_OF_MEMORY;
  if (status == OK && mmap((void*)address, num_bytes, PROT_NONE, MAP_SHARED | MAP_FIXED,
                           backing->fd, 0) == MAP_FAILED)
    status = INVALID_VALUE;
  if (status == OK) {
    int at = num_mapped++;
    for (; at > 0 && mapped[at - 1].start > address; --at) mapped[at] = mapped[at - 1];
    mapped[at] = (Mapped){address, num_bytes, backing, 0};
    ++backing->num_references;
    count_held(MAPPED, 1);
  }
  pthread_mutex_unlock(&virtual_lock);
  return status;
}
int cuMemSetAccess(uint64_t address, size_t num_bytes, const Access* access, size_t count) {
  ENTER_DEVICE();
  uint64_t at = address;
  pthread_mutex_lock(&virtual_lock);
  for (int i = 0; i < num_mapped; ++i)
    if (mapped[i].start == at && at < address + num_bytes) {
      mapped[i].is_accessible = access->access == 3;
      mprotect((void*)at, mapped[i].num_bytes, PROT_READ | PROT_WRITE);
      at += mapped[i].num_bytes;
    }
  pthread_mutex_unlock(&virtual_lock);
  return at == address + num_bytes ? OK : INVALID_VALUE;
}
int cuMemUnmap(uint64_t address, size_t num_bytes) {
  ENTER_DEVICE();
  int status = INVALID_VALUE;
  pthread_mutex_lock(&virtual_lock);
  for (int i = 0; i < num_mapped; ++i) {
    if (mapped[i].start != address || mapped[i].num_bytes != num_bytes) continue;
    mmap((void*)address, num_bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    drop_backing(mapped[i].backing);
    memmove(&mapped[i], &mapped[i + 1], (--num_mapped - i) * sizeof(Mapped));
    count_held(MAPPED, -1);
    status = OK;
    break;
  }
  pthread_mutex_unlock(&virtual_lock);
  return status;
}
