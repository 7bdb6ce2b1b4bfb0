/* What torch_npu needs of CANN to be imported and to hand out one device whose memory is the host's.
 *
 * Written by us for tests: nothing is computed. An operator that runs on this "device" returns what the
 * memory held before, so no number that comes out of it means anything; the suite refuses such a device
 * (backends/ascend.py checks its arithmetic). Functions not written here are generated as `return 0`. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const size_t MEMORY = (size_t)64 << 30; /* bytes the device claims, as a 910B2 */

typedef struct { struct timespec at; } Event;

static int allocate(void **pointer, size_t size) {
    *pointer = aligned_alloc(512, (size + 511) / 512 * 512);
    return *pointer == NULL;
}

int aclrtMalloc(void **p, size_t size, int policy) { return allocate(p, size); }
int aclrtMallocAlign32(void **p, size_t size, int policy) { return allocate(p, size); }
int aclrtMallocHost(void **p, size_t size) { return allocate(p, size); }
int aclrtFree(void *p) { free(p); return 0; }
int aclrtFreeHost(void *p) { free(p); return 0; }
int aclrtMemcpy(void *to, size_t room, const void *from, size_t n, int kind) {
    if (n > room) return 1;
    memmove(to, from, n);
    return 0;
}
int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t n, int kind, void *stream) {
    return aclrtMemcpy(to, room, from, n, kind);
}
int aclrtMemset(void *p, size_t room, int32_t value, size_t n) { memset(p, value, n); return n > room; }
int aclrtGetMemInfo(int kind, size_t *free_bytes, size_t *total) {
    *free_bytes = MEMORY; *total = MEMORY;
    return 0;
}

int aclrtGetDeviceCount(uint32_t *count) {
    const char *asked = getenv("STUB_DEVICES");
    *count = asked ? (uint32_t)atoi(asked) : 1;
    return 0;
}
int aclrtGetDevice(int32_t *device) { *device = 0; return 0; }
int aclrtGetCurrentContext(void **context) { static int one; *context = &one; return 0; }
const char *aclrtGetSocName(void) {
    const char *asked = getenv("STUB_SOC");
    return asked ? asked : "Ascend910B2";
}
const char *aclGetRecentErrMsg(void) { return "stub"; }

int aclrtCreateStream(void **stream) { *stream = malloc(1); return 0; }
int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flag) {
    return aclrtCreateStream(stream);
}
int aclrtCreateEventExWithFlag(void **event, uint32_t flag) { *event = calloc(1, sizeof(Event)); return 0; }
int aclrtCreateEventWithFlag(void **event, uint32_t flag) { return aclrtCreateEventExWithFlag(event, flag); }
int aclrtRecordEvent(void *event, void *stream) { clock_gettime(CLOCK_MONOTONIC, &((Event *)event)->at); return 0; }
int aclrtEventElapsedTime(float *ms, void *start, void *end) {
    struct timespec a = ((Event *)start)->at, b = ((Event *)end)->at;
    *ms = (float)((b.tv_sec - a.tv_sec) * 1e3 + (b.tv_nsec - a.tv_nsec) / 1e6);
    return 0;
}
int aclrtDestroyEvent(void *event) { free(event); return 0; }

void *aclCreateTensorDesc(int type, int rank, const int64_t *dims, int format) { return malloc(1); }
void *aclCreateDataBuffer(void *data, size_t size) { return malloc(1); }
void *aclopCreateAttr(void) { return malloc(1); }
int aclrtGetSysParamOpt(int name, int64_t *value) { *value = 0; return 0; }
int aclrtCtxGetSysParamOpt(int name, int64_t *value) { *value = 0; return 0; }
