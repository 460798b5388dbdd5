// Detection of shared-memory races: two threads access a word, one of them writes, and no barrier is between.
//
// Since Volta, GPUs schedule threads independently, so the order in which this program runs lanes and warps orders
// nothing. Only these do: a block barrier (among its warps), WARPSYNC, and the warp-synchronous SHFL, VOTE, MATCH and
// REDUX (among their lanes).
//
// Time is one counter per block that advances at every such event; an access carries its time. Every warp keeps a
// vector clock: up to which time it has seen each other warp. Since most kernels only have full barriers, two scalar
// floors decide nearly every query; the clocks decide the rest.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace gpu_emulator {

constexpr int kLanes = 32;
constexpr int kMaxWarps = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;

// The last unordered accesses of one kind to a word: by lanes of one warp, or by several warps. Packed, because every
// shared access reads and writes one or two of them per word.
struct AccessRecord {
  uint32_t stamp = 0;  // time << 7 | atomic << 6 | several << 5 | warp; 0: never
  uint32_t mask = 0;   // lanes of `warp`, or warps if several

  static constexpr uint32_t kAtomic = 64, kSeveral = 32, kMaxTime = (1u << 25) - 1;
  uint32_t time() const { return stamp >> 7; }
  int warp() const { return static_cast<int>(stamp & 31); }
  bool several() const { return stamp & kSeveral; }
  bool atomic() const { return stamp & kAtomic; }
  bool one_warp(int w) const { return (stamp & (kSeveral | 31)) == static_cast<uint32_t>(w); }
};

struct ShadowWord {
  AccessRecord write, read;
};

struct WarpClock {
  uint32_t seen[kMaxWarps] = {};  // accesses of warp v at a time <= seen[v] come before everything this warp does now
  uint32_t floor_block = 0;       // minimum of seen[]
  uint32_t floor_warp = 0;        // the same among the lanes of this warp
  // Lane b has seen lane a up to lane_seen[b][a]. Allocated only when part of a warp synchronises.
  std::vector<uint32_t> lane_seen;
};

struct RaceHit {
  enum Kind { kNothing, kWithWrite, kWithRead, kUnwritten, kUnfinishedCopy };
  Kind kind = kNothing;
  uint32_t offset = 0;  // of the first byte concerned
  int lane = -1;        // the accessing lane
  int other_warp = -1;
  int other_lane = -1;  // -1: unknown
  explicit operator bool() const { return kind != kNothing; }
};

class RaceDetector {
 public:
  // `partial_barriers`: the kernel has barriers of a part of the block.
  void start_block(int warps, size_t bytes, int unit_bytes, bool partial_barriers, bool asynchronous_copies);

  // Lanes `mask` of warp `w` synchronised among themselves; `alive` are its live lanes.
  void warp_sync(int w, uint32_t mask, uint32_t alive);
  // A warp arrives at a barrier without waiting: returns an upper bound of the times of its accesses so far.
  uint32_t arrive();
  // `members` (masks of warps) have arrived. Of these, `waiters` did nothing since and now continue, `gone` have exited
  // without arriving, and the others arrived at the times arrival[] and have continued.
  void complete_barrier(uint32_t members, uint32_t waiters, uint32_t gone, const uint32_t* arrival);

  // One access of `lanes` of warp `w` to the bytes [begin, end). Returns the first race, or read of an unwritten word.
  // `tolerate_atomics`: plain reads may run concurrently with atomics, as in compare-and-swap loops.
  RaceHit read(int w, uint32_t lanes, uint32_t begin, uint32_t end, bool tolerate_atomics);
  RaceHit write(int w, uint32_t lanes, uint32_t begin, uint32_t end);
  RaceHit atomic(int w, uint32_t lanes, uint32_t begin, uint32_t end, bool tolerate_atomics);

  // An asynchronous copy writes at some time between its start and its thread's wait. Until the wait any access is a
  // race; after it, the bytes count as just written by that thread.
  RaceHit start_copy(int w, int lane, uint32_t begin, uint32_t end);
  void finish_copy(int w, int lane, uint32_t begin, uint32_t end);

 private:
  // Quick test: ordered before everything that warp `w` does now.
  bool settled(const AccessRecord& r, const WarpClock& c, int w) const {
    return r.time() <= c.floor_block || (r.one_warp(w) && r.time() <= c.floor_warp);
  }
  bool ordered(const AccessRecord& r, uint32_t unit, int w, uint32_t lanes, RaceHit& hit) const;
  void record(AccessRecord& r, uint32_t unit, int w, uint32_t lanes, bool atomic);
  uint32_t lane_seen(const WarpClock& c, int lane, int other) const;
  void refresh_floor(int w);
  uint32_t tick();
  uint32_t stamp(int w, bool atomic) const {
    return now_ << 7 | (atomic ? AccessRecord::kAtomic : 0u) | static_cast<uint32_t>(w);
  }
  RaceHit meets_copy(uint32_t lanes, uint32_t begin, uint32_t end) const;
  RaceHit report(RaceHit hit, RaceHit::Kind kind, uint32_t unit) const;

  std::vector<ShadowWord> shadow_;
  // Only with partial barriers, which may order the warps of one record one by one: each warp's last read of a unit.
  std::vector<uint32_t> read_times_;
  std::vector<uint16_t> copied_by_;  // per unit, with asynchronous copies: the thread plus one, or zero
  std::vector<WarpClock> clocks_;
  int warps_ = 0;
  bool partial_barriers_ = false;
  int unit_shift_ = 2;
  uint32_t now_ = 1;
};

}  // namespace gpu_emulator
