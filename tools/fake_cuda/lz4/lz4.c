/* Decompresses an LZ4 block: sequences of literal bytes, each followed by a copy of earlier output. */
#include <stdint.h>
#include <string.h>

typedef struct {
  const uint8_t *at, *end;
} Packed;

/* A length of 15 continues in the following bytes, up to the first that is not 255. */
static uint64_t long_length(Packed* packed, uint64_t length) {
  if (length < 15) return length;
  uint8_t more = 255;
  while (more == 255 && packed->at < packed->end) length += more = *packed->at++;
  return length;
}

/* Returns the number of bytes written: fewer than `room` if the block is damaged or ends early. */
__attribute__((visibility("default"))) uint64_t unpack_lz4(const uint8_t* block, uint64_t bytes, uint8_t* out,
                                                           uint64_t room) {
  Packed packed = {block, block + bytes};
  uint64_t written = 0;
  while (packed.at < packed.end) {
    const uint8_t token = *packed.at++;
    const uint64_t literals = long_length(&packed, token >> 4);
    if (literals > (uint64_t)(packed.end - packed.at) || literals > room - written) break;
    memcpy(out + written, packed.at, literals);
    written += literals;
    packed.at += literals;
    if (packed.end - packed.at < 2) break; /* the last sequence has no copy */
    const uint64_t distance = (uint64_t)packed.at[0] | (uint64_t)packed.at[1] << 8;
    packed.at += 2;
    const uint64_t length = long_length(&packed, token & 15) + 4;
    if (distance == 0 || distance > written || length > room - written) break;
    for (uint64_t i = 0; i < length; i++, written++) out[written] = out[written - distance]; /* may overlap itself */
  }
  return written;
}
