/* What fake drivers have in common: devices, the calling thread's device, planned failures, a log of calls. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEVICES 80
#define FAILURES 32

typedef int (*launched)(int device, const void *image, const char *name, unsigned blocks, unsigned threads, unsigned shared,
                        void *stream, void **arguments);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int count;
static char names[DEVICES][64];
static int broken[DEVICES];
static struct { char symbol[64]; int error, device, times; } failures[FAILURES];
static char text[1 << 20];
static size_t used;
static launched on_launch;
static __thread int current = -1;

void fake_on_launch(launched f) { on_launch = f; }
const char *fake_log(void) { return text; }
void fake_current(int device) { current = device; }
void fake_break(int device, int error) { broken[device] = error; }

void fake_devices(int n, const char **given) {
  count = n;
  for (int k = 0; k < n; k++) snprintf(names[k], sizeof names[k], "%s", given[k]);
}

void fake_fail(const char *symbol, int error, int device, int times) {
  int k = 0;
  while (k < FAILURES - 1 && failures[k].symbol[0] && strcmp(failures[k].symbol, symbol)) k++;
  snprintf(failures[k].symbol, sizeof failures[k].symbol, "%s", symbol);
  failures[k].error = error, failures[k].device = device, failures[k].times = times;
}

/* Notes a call for a device; the error that was planned for it, or 0. */
static int noted(const char *symbol, int device) {
  int error = 0;
  pthread_mutex_lock(&lock);
  if (used < sizeof text - 128) used += snprintf(text + used, sizeof text - used, "%s %d\n", symbol, device);
  for (int k = 0; k < FAILURES; k++)
    if (!strcmp(failures[k].symbol, symbol) && failures[k].times && (failures[k].device < 0 || failures[k].device == device)) {
      error = failures[k].error;
      if (failures[k].times > 0) failures[k].times--;
      break;
    }
  pthread_mutex_unlock(&lock);
  return error;
}

/* The same of a call that a broken device refuses. */
static int asked(const char *symbol, int device) {
  int error = noted(symbol, device);
  return error ? error : device >= 0 && device < DEVICES ? broken[device] : 0;
}
