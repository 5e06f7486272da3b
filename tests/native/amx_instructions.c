/* Executes instructions of AMX on a processor that lacks them: a handler of SIGILL reads the bytes of the instruction that
   stopped, does in C what Intel's manual says, and goes on behind it. Each thread has tile registers of its own.
   Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, LDTILECFG to TILEZERO; volume 2A, 2.3 (VEX). */
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { TILES = 8, ROWS = 16, ROW_BYTES = 64, MOST_THREADS = 256 };

/* Tile registers of a thread. */
typedef struct {
    _Atomic int thread;
    int configured;
    uint16_t row_bytes[TILES];
    uint8_t rows[TILES], tiles[TILES][ROWS][ROW_BYTES];
} State;

static State states[MOST_THREADS];
/* Instructions done, by kind: configurations, loads, stores, zeros, products. */
_Atomic long amx_counts[5];
static struct sigaction before;

static float bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    if ((wide & 0x7f800000) == 0) wide &= 0x80000000; /* subnormals are zero */
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static float flushed(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7f800000) == 0) bits &= 0x80000000;
    memcpy(&value, &bits, 4);
    return value;
}

static State *state_of_thread(void) {
    int thread = (int)syscall(SYS_gettid);
    for (int at = 0; at < MOST_THREADS; at++) {
        int nobody = 0;
        if (states[at].thread == thread || __atomic_compare_exchange_n((int *)&states[at].thread, &nobody, thread, 0, 5, 5))
            return &states[at];
    }
    return 0;
}

static int64_t general(const ucontext_t *context, int number) {
    static const int names[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8, REG_R9, REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return context->uc_mcontext.gregs[names[number]];
}

/* The address of a memory operand without its index register, and that register's value, scaled; *at is behind both then. */
static uint8_t *address(const ucontext_t *context, const uint8_t **at, uint8_t modrm, int x, int b, int64_t *stride) {
    int mod = modrm >> 6, rm = modrm & 7;
    int64_t base = 0, place = 0;
    *stride = 0;
    if (rm == 4) {
        uint8_t sib = *(*at)++;
        int low = sib & 7, which = ((sib >> 3) & 7) | x << 3;
        if (which != 4) {
            *stride = general(context, which) << (sib >> 6);
        }
        if (low == 5 && mod == 0) {
            int32_t wide;
            memcpy(&wide, *at, 4);
            *at += 4;
            place = wide;
        } else {
            base = general(context, low | b << 3);
        }
    } else if (mod == 0 && rm == 5) { /* relative to the next instruction: no operand follows */
        int32_t wide;
        memcpy(&wide, *at, 4);
        *at += 4;
        base = (int64_t)*at + wide;
    } else {
        base = general(context, rm | b << 3);
    }
    if (mod == 1) place = *(const int8_t *)(*at)++;
    if (mod == 2) {
        int32_t wide;
        memcpy(&wide, *at, 4);
        *at += 4;
        place = wide;
    }
    return (uint8_t *)(base + place);
}

/* Tile c += tile x times tile y. kind 0: pairs of bfloat16; 1 to 4: bytes, signed times signed, su, us, uu. */
static void product(State *s, int kind, int c, int left_tile, int right_tile) {
    for (int i = 0; i < s->rows[c]; i++) {
        for (int j = 0; j < s->row_bytes[c] / 4; j++) {
            for (int word = 0; word < s->row_bytes[left_tile] / 4; word++) {
                const uint8_t *x = &s->tiles[left_tile][i][4 * word], *y = &s->tiles[right_tile][word][4 * j];
                if (kind == 0) {
                    float sum, product;
                    uint16_t a[2], b[2];
                    memcpy(&sum, &s->tiles[c][i][4 * j], 4);
                    memcpy(a, x, 4);
                    memcpy(b, y, 4);
                    for (int e = 0; e < 2; e++) {
                        product = flushed(bf16(a[e]) * bf16(b[e]));
                        sum = flushed(sum + product);
                    }
                    memcpy(&s->tiles[c][i][4 * j], &sum, 4);
                } else {
                    uint32_t sum;
                    memcpy(&sum, &s->tiles[c][i][4 * j], 4);
                    for (int e = 0; e < 4; e++) {
                        int32_t left = kind == 1 || kind == 2 ? (int8_t)x[e] : x[e];
                        int32_t right = kind == 1 || kind == 3 ? (int8_t)y[e] : y[e];
                        sum += (uint32_t)(left * right);
                    }
                    memcpy(&s->tiles[c][i][4 * j], &sum, 4);
                }
            }
        }
    }
}

/* Whether the instruction was one of AMX and has been done. */
static int done(ucontext_t *context) {
    const uint8_t *start = (const uint8_t *)context->uc_mcontext.gregs[REG_RIP], *at = start;
    if (*at++ != 0xc4) return 0;
    int r = !(*at & 0x80), x = !(*at & 0x40), b = !(*at & 0x20), map = *at & 0x1f;
    at++;
    int wide = *at >> 7, v = ~(*at >> 3) & 15, length = *at >> 2 & 1, prefix = *at & 3;
    at++;
    if (map != 2 || wide || length) return 0;
    uint8_t opcode = *at++, modrm = *at++;
    int reg = ((modrm >> 3) & 7) | r << 3, rm = modrm & 7;
    int64_t stride;
    State *s = state_of_thread();
    if (!s) return 0;
    if (opcode == 0x49) {
        if (prefix == 0 && modrm == 0xc0) { /* TILERELEASE */
            s->configured = 0;
        } else if (prefix == 0 && (modrm & 0x38) == 0 && modrm >> 6 != 3) { /* LDTILECFG */
            const uint8_t *config = address(context, &at, modrm, x, b, &stride);
            config += stride;
            if (config[0] != 1) return 0;
            for (int t = 0; t < TILES; t++) {
                memcpy(&s->row_bytes[t], config + 16 + 2 * t, 2);
                s->rows[t] = config[48 + t];
                if (s->rows[t] > ROWS || s->row_bytes[t] > ROW_BYTES) return 0;
            }
            memset(s->tiles, 0, sizeof s->tiles);
            s->configured = 1;
            amx_counts[0]++;
        } else if (prefix == 3 && modrm >> 6 == 3 && rm == 0) { /* TILEZERO */
            if (!s->configured || reg >= TILES || !s->rows[reg]) return 0;
            memset(s->tiles[reg], 0, sizeof s->tiles[reg]);
            amx_counts[3]++;
        } else {
            return 0;
        }
    } else if (opcode == 0x4b && modrm >> 6 != 3 && rm == 4) { /* TILELOADD, TILELOADDT1, TILESTORED */
        if (!s->configured || reg >= TILES || !s->rows[reg]) return 0;
        uint8_t *place = address(context, &at, modrm, x, b, &stride);
        if (prefix == 2) {
            for (int i = 0; i < s->rows[reg]; i++) memcpy(place + i * stride, s->tiles[reg][i], s->row_bytes[reg]);
            amx_counts[2]++;
        } else if (prefix == 1 || prefix == 3) {
            memset(s->tiles[reg], 0, sizeof s->tiles[reg]);
            for (int i = 0; i < s->rows[reg]; i++) memcpy(s->tiles[reg][i], place + i * stride, s->row_bytes[reg]);
            amx_counts[1]++;
        } else {
            return 0;
        }
    } else if ((opcode == 0x5c && prefix == 2) || opcode == 0x5e) { /* TDPBF16PS, TDPB[SU][SU]D */
        /* prefix of 5e: none uu, 66 us, f3 su, f2 ss */
        static const int kinds[4] = {4, 3, 2, 1};
        if (modrm >> 6 != 3 || !s->configured || reg >= TILES || rm >= TILES || v >= TILES) return 0;
        if (reg == rm || reg == v || rm == v) return 0; /* three registers, or the instruction is not one */
        if (s->row_bytes[reg] != s->row_bytes[v] || s->row_bytes[rm] / 4 != s->rows[v]) return 0;
        product(s, opcode == 0x5c ? 0 : kinds[prefix], reg, rm, v);
        amx_counts[4]++;
    } else {
        return 0;
    }
    context->uc_mcontext.gregs[REG_RIP] = (int64_t)at;
    return 1;
}

static void handle(int signal, siginfo_t *info, void *context) {
    ucontext_t *stopped = context;
    /* Some systems tell another thread than the one that stopped: that one tries again, and is told itself at last. */
    if ((intptr_t)info->si_addr != stopped->uc_mcontext.gregs[REG_RIP]) return;
    if (!done(stopped)) sigaction(signal, &before, 0); /* the instruction runs again, and ends as it would have */
}

int amx_install(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO | SA_NODEFER; /* a thread may be told of another while it is here */
    return sigaction(SIGILL, &action, &before);
}
