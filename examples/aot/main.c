/* Sharpens a test image and prints a few numbers of it. */
#include <stdio.h>
#include <stdlib.h>

#include "sharpen.h"

enum { HEIGHT = 480, WIDTH = 640 };

int main(void) {
  float *img = malloc(sizeof(float) * HEIGHT * WIDTH);
  float *out = malloc(sizeof(float) * (HEIGHT - 2) * (WIDTH - 2));
  for (int y = 0; y < HEIGHT; y++)
    for (int x = 0; x < WIDTH; x++) img[y * WIDTH + x] = (float)((x / 8 + y / 8) % 2) * 0.5f + 0.25f;
  int code = sharpen_try(img, out);
  if (code != SHARPEN_OK) {
    fprintf(stderr, "sharpen_try returned %d\n", code);
    return 1;
  }
  double sum = 0;
  for (int k = 0; k < (HEIGHT - 2) * (WIDTH - 2); k++) sum += out[k];
  printf("mean %.6f, %zu bytes of memory per call\n", sum / ((HEIGHT - 2) * (WIDTH - 2)), (size_t)SHARPEN_MEMORY_BYTES);
  free(img);
  free(out);
  return 0;
}
