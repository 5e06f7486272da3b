/* libcuda on memory of the CPU. Device n has number n + 10; names are compute capabilities. */
#include "fake.h"

enum { NO_CONTEXT = 201, NO_BINARY = 209, NO_IMAGE = 200, INVALID_HANDLE = 400, INVALID_VALUE = 1, FIRST = 10 };

typedef struct { const char *image; char name[256]; } library;
typedef struct { library *of; int shared[DEVICES]; } kernel;

static int active[DEVICES], retained[DEVICES];
static int refuses_machine_code;
static __thread int capture = 1; /* of the thread: 0 and 1 forbid loading while a stream is recorded, 2 does not */
static int recording;

void fake_refuse_machine_code(int yes) { refuses_machine_code = yes; }
void fake_recording(int yes) { recording = yes; }
void fake_active(int device, int yes) { active[device] = yes; }
int fake_retained(int device) { return retained[device]; }

int cuInit(unsigned flags) { return noted("cuInit", -1); }

int cuGetErrorName(int error, const char **out) {
  *out = error == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : error == 719 ? "CUDA_ERROR_LAUNCH_FAILED" : error == 200 ? "CUDA_ERROR_INVALID_IMAGE"
       : error == 209 ? "CUDA_ERROR_NO_BINARY_FOR_GPU" : error == 100 ? "CUDA_ERROR_NO_DEVICE" : error == 201 ? "CUDA_ERROR_INVALID_CONTEXT" : 0;
  return *out ? 0 : INVALID_VALUE;
}

int cuGetErrorString(int error, const char **out) {
  *out = error == 700 ? "an illegal memory access was encountered" : error == 719 ? "unspecified launch failure" : 0;
  return *out ? 0 : INVALID_VALUE;
}

int cuDeviceGetCount(int *out) { return *out = count, noted("cuDeviceGetCount", -1); }

int cuDeviceGet(int *out, int device) { return *out = device + FIRST, device < count ? noted("cuDeviceGet", device) : INVALID_VALUE; }

int cuDeviceGetAttribute(int *out, int attribute, int number) {
  int major = 0, minor = 0;
  sscanf(names[number - FIRST], "%d.%d", &major, &minor);
  *out = attribute == 75 ? major : minor;
  return attribute == 75 || attribute == 76 ? noted("cuDeviceGetAttribute", number - FIRST) : INVALID_VALUE;
}

int cuCtxGetDevice(int *out) {
  if (current < 0) return NO_CONTEXT;
  return *out = current, noted("cuCtxGetDevice", current);
}

int cuThreadExchangeStreamCaptureMode(int *mode) {
  int before = capture;
  capture = *mode, *mode = before;
  return noted("cuThreadExchangeStreamCaptureMode", current);
}

int cuLibraryLoadData(library **out, const void *image, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
  int error = noted("cuLibraryLoadData", current);
  if (error) return error;
  if (recording && capture != 2) return 900;
  if (!memcmp(image, "\177ELF", 4) && refuses_machine_code) return NO_IMAGE;
  *out = calloc(1, sizeof(library));
  (*out)->image = strdup(image);
  return 0;
}

int cuLibraryUnload(library *of) { return noted("cuLibraryUnload", current); }

int cuLibraryGetKernel(kernel **out, library *of, const char *name) {
  *out = calloc(1, sizeof(kernel));
  (*out)->of = of;
  snprintf(of->name, sizeof of->name, "%s", name);
  return noted("cuLibraryGetKernel", current);
}

/* PTX runs on its architecture and newer ones; that of sm_90a on nothing else. */
static int runs_on(const char *image, int device) {
  int major, minor, target;
  const char *at = strstr(image, ".target sm_");
  sscanf(names[device], "%d.%d", &major, &minor);
  if (!at) return 1;
  target = atoi(at + 11);
  return at[11 + (target > 99) + 2] == 'a' ? target == 10 * major + minor : target <= 10 * major + minor;
}

int cuKernelGetFunction(void **out, kernel *k) {
  int error = asked("cuKernelGetFunction", current);
  *out = k;
  return error ? error : current < 0 ? NO_CONTEXT : runs_on(k->of->image, current) ? 0 : NO_BINARY;
}

int cuKernelSetAttribute(int attribute, int value, kernel *k, int number) {
  int error = noted("cuKernelSetAttribute", number - FIRST);
  if (!error && attribute == 8) k->shared[number - FIRST] = value;
  return error ? error : attribute == 8 ? 0 : INVALID_VALUE;
}

int cuLaunchKernel(kernel *k, unsigned x, unsigned y, unsigned z, unsigned tx, unsigned ty, unsigned tz, unsigned shared, void *stream,
                   void **arguments, void **extra) {
  int error = asked("cuLaunchKernel", current);
  if (error) return error;
  if (current < 0) return NO_CONTEXT;
  if (!runs_on(k->of->image, current)) return NO_BINARY;
  if ((int)shared > k->shared[current] && shared > 48 << 10) return INVALID_VALUE;
  active[current] = 1;
  return on_launch(current, k->of->image, k->of->name, x, tx, shared, stream, arguments);
}

int cuMemcpyDtoDAsync_v2(void *to, const void *from, size_t n, void *stream) {
  int error = asked("cuMemcpyDtoDAsync_v2", current);
  if (!error) memmove(to, from, n);
  return error;
}

int cuMemcpyDtoHAsync_v2(void *to, const void *from, size_t n, void *stream) {
  int error = asked("cuMemcpyDtoHAsync_v2", current);
  if (!error) memmove(to, from, n);
  return error;
}

int cuMemsetD8Async(void *to, unsigned char value, size_t n, void *stream) {
  int error = asked("cuMemsetD8Async", current);
  if (!error) memset(to, value, n);
  return error;
}

int cuStreamSynchronize(void *stream) { return asked("cuStreamSynchronize", current); }

int cuDevicePrimaryCtxGetState(int number, unsigned *flags, int *out) {
  *flags = 0, *out = active[number - FIRST];
  return noted("cuDevicePrimaryCtxGetState", number - FIRST);
}

int cuDevicePrimaryCtxRetain(void **out, int number) {
  int error = noted("cuDevicePrimaryCtxRetain", number - FIRST);
  if (!error) retained[number - FIRST]++, *out = (void *)(intptr_t)number;
  return error;
}

int cuDevicePrimaryCtxRelease_v2(int number) { return retained[number - FIRST]--, noted("cuDevicePrimaryCtxRelease_v2", number - FIRST); }

static __thread int pushed[8], depth;

int cuCtxPushCurrent_v2(void *context) {
  int error = noted("cuCtxPushCurrent_v2", (int)(intptr_t)context - FIRST);
  if (!error) pushed[depth++] = current, current = (int)(intptr_t)context - FIRST;
  return error;
}

int cuCtxPopCurrent_v2(void **out) {
  if (!depth) return NO_CONTEXT;
  *out = (void *)(intptr_t)(current + FIRST), current = pushed[--depth];
  return noted("cuCtxPopCurrent_v2", current);
}

int cuCtxSynchronize(void) { return current < 0 ? NO_CONTEXT : asked("cuCtxSynchronize", current); }
