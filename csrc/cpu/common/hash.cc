// How a change reaches all bits of the hash:
//
// 1. A step multiplies two 64-bit words to 128 bits and folds the halves (as in wyhash). A product alone carries bits
//    upwards only: a changed sign, the top bit of a float, would stay the top bit, and two of them would cancel. The
//    fold brings the carried bits back to the bottom.
// 2. One of the words is first combined with the lane's state. So a step depends on all that the lane has seen, in
//    order, and later steps propagate a change.
// 3. The other word is combined with a constant of the lane, so that zeros do not give zero and lanes differ.
// 4. Eight independent lanes hide the latency of the multiplication. Vector instructions multiply only 32 bits: faster
//    than memory is read, but two changed signs would cancel once in 2^32.
// 5. The lanes are joined one after another, each by a bijection on 64 bits.
#include "common/hash.h"

#include <cstring>

namespace polyconv {
namespace {

constexpr int kLanes = 8;
constexpr std::size_t kStripe = kLanes * 2 * sizeof(std::uint64_t);

// Digits of pi after the point, as arbitrary constants.
constexpr std::uint64_t kPi[2 * kLanes] = {
    0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89,
    0x452821E638D01377, 0xBE5466CF34E90C6C, 0xC0AC29B7C97C50DD, 0x3F84D5B5B5470917,
    0x9216D5D98979FB1B, 0xD1310BA698DFB5AC, 0x2FFD72DBD01ADFB7, 0xB8E1AFED6A267E96,
    0xBA7C9045F12C7F99, 0x24A19947B3916CF7, 0x0801F2E2858EFC16, 0x636920D871574E69,
};

inline std::uint64_t FoldedProduct(std::uint64_t a, std::uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

inline std::uint64_t Word(const unsigned char* bytes) {
  std::uint64_t word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

inline void Absorb(const unsigned char* stripe, std::uint64_t (&lanes)[kLanes]) {
  for (int i = 0; i < kLanes; i++, stripe += 2 * sizeof(std::uint64_t)) {
    lanes[i] = FoldedProduct(Word(stripe) ^ kPi[i], Word(stripe + sizeof(std::uint64_t)) ^ lanes[i]);
  }
}

// Bijection; flipping any bit of the argument flips each bit of the result in half of all cases (splitmix64).
inline std::uint64_t Avalanche(std::uint64_t bits) {
  bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9;
  bits = (bits ^ bits >> 27) * 0x94D049BB133111EB;
  return bits ^ bits >> 31;
}

}  // namespace

std::uint64_t Hash(const void* data, std::size_t bytes) {
  const auto* position = static_cast<const unsigned char*>(data);
  std::uint64_t lanes[kLanes];
  std::memcpy(lanes, kPi + kLanes, sizeof lanes);
  const auto* end = position + bytes;
  for (; static_cast<std::size_t>(end - position) >= kStripe; position += kStripe) Absorb(position, lanes);
  if (position != end) {  // zeros fill the last stripe; the size, hashed too, tells them from zeros in the data
    unsigned char rest[kStripe] = {};
    std::memcpy(rest, position, static_cast<std::size_t>(end - position));
    Absorb(rest, lanes);
  }
  std::uint64_t hash = bytes;
  for (std::uint64_t lane : lanes) hash = Avalanche(hash + 0x9E3779B97F4A7C15) ^ lane;
  return Avalanche(hash);
}

}  // namespace polyconv
