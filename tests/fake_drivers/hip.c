/* libamdhip64 on memory of the CPU; names are architectures with their features. -DOLD: of ROCm before 6. */
#include "fake.h"

enum { NO_DEVICE = 100, NO_BINARY = 209, NO_IMAGE = 200, INVALID_HANDLE = 400 };

typedef struct { const char *image; int device; char name[256]; } module;

static __thread int capture = 1;
static int recording;

void fake_recording(int yes) { recording = yes; }

int hipInit(unsigned flags) { return noted("hipInit", -1); }

int hipDrvGetErrorName(int error, const char **out) {
  *out = error == 209 ? "hipErrorNoBinaryForGpu" : error == 700 ? "hipErrorIllegalAddress" : error == 719 ? "hipErrorLaunchFailure"
       : error == 200 ? "hipErrorInvalidImage" : error == 100 ? "hipErrorNoDevice" : 0;
  return 0;
}

int hipDrvGetErrorString(int error, const char **out) { return *out = error == 209 ? "no kernel image is available" : 0, 0; }

/* A thread of HIP's is on device 0 until it says otherwise. */
static int here(void) { return current < 0 ? 0 : current; }

int hipGetDevice(int *out) { return *out = here(), count ? noted("hipGetDevice", here()) : NO_DEVICE; }

#ifdef OLD
int hipGetDeviceProperties(char *out, int device) {
  memset(out, 0, 792);
  strcpy(out, "AMD Radeon Graphics");
  strcpy(out + 396, names[device]);
  return noted("hipGetDeviceProperties", device);
}
#else
int hipGetDevicePropertiesR0600(char *out, int device) {
  memset(out, 0, 1472);
  strcpy(out, "gfx1036");
  strcpy(out + 1160, names[device]);
  return noted("hipGetDevicePropertiesR0600", device);
}
#endif

int hipThreadExchangeStreamCaptureMode(int *mode) {
  int before = capture;
  capture = *mode, *mode = before;
  return noted("hipThreadExchangeStreamCaptureMode", here());
}

/* A code object names its architecture in its notes; the eighth byte of an ELF file is its version, from 2 on less 2. */
int hipModuleLoadData(module **out, const unsigned char *image) {
  uint64_t sections = 0;
  uint16_t size = 0, many = 0;
  char wanted[64];
  int error = asked("hipModuleLoadData", here());
  if (error) return error;
  if (recording && capture != 2) return 900;
  if (memcmp(image, "\177ELF", 4)) return NO_IMAGE;
#ifdef OLD
  if (image[8] > 3) return NO_IMAGE;
#endif
  memcpy(&sections, image + 40, 8), memcpy(&size, image + 58, 2), memcpy(&many, image + 60, 2);
  snprintf(wanted, sizeof wanted, "amdgcn-amd-amdhsa--%.*s", (int)strcspn(names[here()], ":"), names[here()]);
  size_t length = sections + (size_t)size * many, found = 0;
  for (size_t k = 0; k + strlen(wanted) < length && !found; k++) found = !memcmp(image + k, wanted, strlen(wanted));
  if (!found) return NO_BINARY;
  *out = calloc(1, sizeof(module));
  (*out)->image = (const char *)image, (*out)->device = here();
  return 0;
}

int hipModuleGetFunction(module **out, module *of, const char *name) {
  snprintf(of->name, sizeof of->name, "%s", name);
  return *out = of, noted("hipModuleGetFunction", here());
}

int hipModuleLaunchKernel(module *k, unsigned x, unsigned y, unsigned z, unsigned tx, unsigned ty, unsigned tz, unsigned shared, void *stream,
                          void **arguments, void **extra) {
  int error = asked("hipModuleLaunchKernel", here());
  if (error) return error;
  return k->device != here() ? INVALID_HANDLE : on_launch(here(), k->image, k->name, x, tx, shared, stream, arguments);
}

int hipMemcpyDtoDAsync(void *to, const void *from, size_t n, void *stream) {
  int error = asked("hipMemcpyDtoDAsync", here());
  if (!error) memmove(to, from, n);
  return error;
}

int hipMemcpyDtoHAsync(void *to, const void *from, size_t n, void *stream) {
  int error = asked("hipMemcpyDtoHAsync", here());
  if (!error) memmove(to, from, n);
  return error;
}

int hipMemsetD8Async(void *to, unsigned char value, size_t n, void *stream) {
  int error = asked("hipMemsetD8Async", here());
  if (!error) memset(to, value, n);
  return error;
}

int hipStreamSynchronize(void *stream) { return asked("hipStreamSynchronize", here()); }
