#include "race.h"

#include <algorithm>
#include <stdexcept>

namespace gpu_emulator {

void RaceDetector::start_block(int warps, size_t bytes, int unit_bytes, bool partial_barriers,
                               bool asynchronous_copies) {
  unit_shift_ = unit_bytes == 1 ? 0 : 2;
  warps_ = warps;
  now_ = 1;
  shadow_.assign((bytes + unit_bytes - 1) / unit_bytes, ShadowWord{});
  partial_barriers_ = partial_barriers;
  read_times_.assign(partial_barriers ? shadow_.size() * kMaxWarps : 0, 0);
  copied_by_.assign(asynchronous_copies ? shadow_.size() : 0, 0);
  clocks_.assign(warps, WarpClock{});
}

void RaceDetector::refresh_floor(int w) {
  WarpClock& c = clocks_[w];
  uint32_t floor = c.floor_warp;
  for (int v = 0; v < warps_; v++)
    if (v != w) floor = std::min(floor, c.seen[v]);
  c.floor_block = floor;
}

uint32_t RaceDetector::lane_seen(const WarpClock& c, int lane, int other) const {
  uint32_t own = c.lane_seen.empty() ? 0 : c.lane_seen[lane * kLanes + other];
  return std::max(own, c.floor_warp);
}

void RaceDetector::warp_sync(int w, uint32_t mask, uint32_t alive) {
  WarpClock& c = clocks_[w];
  uint32_t time = tick();
  if ((mask & alive) == alive) {
    c.floor_warp = time;
    c.lane_seen.clear();
    if (warps_ == 1) c.floor_block = time;
    return;
  }
  if (c.lane_seen.empty()) c.lane_seen.assign(kLanes * kLanes, 0);
  // All of them have now seen what any of them had seen.
  uint32_t joined[kLanes] = {};
  for (int l = 0; l < kLanes; l++)
    if (mask >> l & 1)
      for (int k = 0; k < kLanes; k++) joined[k] = std::max(joined[k], c.lane_seen[l * kLanes + k]);
  for (int l = 0; l < kLanes; l++)
    if (mask >> l & 1) joined[l] = time;
  for (int l = 0; l < kLanes; l++)
    if (mask >> l & 1) std::copy(joined, joined + kLanes, c.lane_seen.begin() + l * kLanes);
}

uint32_t RaceDetector::arrive() {
  return tick();
}

uint32_t RaceDetector::tick() {
  if (now_ >= AccessRecord::kMaxTime) throw std::runtime_error("too many barriers in one block for the race check");
  return now_++;
}

void RaceDetector::complete_barrier(uint32_t members, uint32_t waiters, uint32_t gone, const uint32_t* arrival) {
  uint32_t joined[kMaxWarps] = {};
  for (int v = 0; v < warps_; v++) {
    if (!(members >> v & 1)) continue;
    for (int u = 0; u < warps_; u++) joined[u] = std::max(joined[u], clocks_[v].seen[u]);
  }
  uint32_t time = tick();
  for (int v = 0; v < warps_; v++)
    if (members >> v & 1) joined[v] = std::max(joined[v], (waiters | gone) >> v & 1 ? time : arrival[v]);
  for (int v = 0; v < warps_; v++) {
    if (!(waiters >> v & 1)) continue;
    WarpClock& c = clocks_[v];
    std::copy(joined, joined + kMaxWarps, c.seen);
    c.floor_warp = time;  // a barrier also converges the warp
    c.lane_seen.clear();
    refresh_floor(v);
  }
}

bool RaceDetector::ordered(const AccessRecord& r, uint32_t unit, int w, uint32_t lanes, RaceHit& hit) const {
  const WarpClock& c = clocks_[w];
  if (settled(r, c, w)) return true;
  if (r.several()) {
    for (int v = 0; v < warps_; v++) {
      if (!(r.mask >> v & 1)) continue;
      // The lanes of the own warp are not recorded; the other warps decide.
      if (v == w && (r.mask & ~(1u << w))) continue;
      uint32_t time = read_times_.empty() || r.atomic() ? r.time() : read_times_[unit * kMaxWarps + v];
      if (time > (v == w ? c.floor_warp : c.seen[v])) {
        hit.lane = __builtin_ctz(lanes);
        hit.other_warp = v;
        return false;
      }
    }
    return true;
  }
  if (r.warp() != w) {
    if (r.time() <= c.seen[r.warp()]) return true;
    hit.lane = __builtin_ctz(lanes);
    hit.other_warp = r.warp();
    hit.other_lane = __builtin_ctz(r.mask);
    return false;
  }
  for (uint32_t ours = lanes; ours; ours &= ours - 1) {
    int l = __builtin_ctz(ours);
    for (uint32_t others = r.mask & ~(1u << l); others; others &= others - 1) {
      int k = __builtin_ctz(others);
      if (r.time() > lane_seen(c, l, k)) {
        hit.lane = l;
        hit.other_warp = w;
        hit.other_lane = k;
        return false;
      }
    }
  }
  return true;
}

// Adds an access. Accesses ordered before it can be forgotten: whatever is ordered after this one is ordered after
// them, too. Concurrent accesses (reads, or atomics) are merged.
inline void RaceDetector::record(AccessRecord& r, uint32_t unit, int w, uint32_t lanes, bool atomic) {
  uint32_t fresh = stamp(w, atomic);
  if (r.stamp == fresh) {
    r.mask |= lanes;
    return;
  }
  if (settled(r, clocks_[w], w)) {
    r = {fresh, lanes};
    return;
  }
  bool concurrent;
  if (r.several() && !partial_barriers_) {
    concurrent = true;  // without partial barriers the quick test is exact
  } else if (!r.several() && r.warp() != w) {
    concurrent = r.time() > clocks_[w].seen[r.warp()];
  } else {
    RaceHit ignored;
    concurrent = r.time() == now_ || !ordered(r, unit, w, lanes, ignored);
  }
  if (!concurrent) {
    r = {fresh, lanes};
  } else if (r.one_warp(w)) {
    r = {fresh, r.mask | lanes};
  } else {
    uint32_t warps = r.several() ? r.mask : 1u << r.warp();
    r = {fresh | AccessRecord::kSeveral, warps | 1u << w};
  }
}

RaceHit RaceDetector::report(RaceHit hit, RaceHit::Kind kind, uint32_t unit) const {
  hit.kind = kind;
  hit.offset = unit << unit_shift_;
  return hit;
}

RaceHit RaceDetector::meets_copy(uint32_t lanes, uint32_t begin, uint32_t end) const {
  RaceHit hit;
  if (copied_by_.empty()) return hit;
  for (uint32_t u = begin >> unit_shift_; u << unit_shift_ < end; u++) {
    if (!copied_by_[u]) continue;
    hit.lane = __builtin_ctz(lanes);
    hit.other_warp = (copied_by_[u] - 1) / kLanes;
    hit.other_lane = (copied_by_[u] - 1) % kLanes;
    return report(hit, RaceHit::kUnfinishedCopy, u);
  }
  return hit;
}

RaceHit RaceDetector::start_copy(int w, int lane, uint32_t begin, uint32_t end) {
  RaceHit hit = write(w, 1u << lane, begin, end);
  if (hit) return hit;
  for (uint32_t u = begin >> unit_shift_; u << unit_shift_ < end; u++)
    copied_by_[u] = static_cast<uint16_t>(w * kLanes + lane + 1);
  return hit;
}

void RaceDetector::finish_copy(int w, int lane, uint32_t begin, uint32_t end) {
  for (uint32_t u = begin >> unit_shift_; u << unit_shift_ < end; u++) {
    copied_by_[u] = 0;
    shadow_[u].write = {stamp(w, false), 1u << lane};
  }
}

RaceHit RaceDetector::read(int w, uint32_t lanes, uint32_t begin, uint32_t end, bool tolerate_atomics) {
  RaceHit hit = meets_copy(lanes, begin, end);
  if (hit) return hit;
  const WarpClock& c = clocks_[w];
  for (uint32_t u = begin >> unit_shift_; u << unit_shift_ < end; u++) {
    ShadowWord& s = shadow_[u];
    if (s.write.stamp == 0) {
      hit.lane = __builtin_ctz(lanes);
      return report(hit, RaceHit::kUnwritten, u);
    }
    if (!settled(s.write, c, w) && !(tolerate_atomics && s.write.atomic()) && !ordered(s.write, u, w, lanes, hit))
      return report(hit, RaceHit::kWithWrite, u);
    record(s.read, u, w, lanes, false);
    if (!read_times_.empty()) read_times_[u * kMaxWarps + static_cast<uint32_t>(w)] = now_;
  }
  return hit;
}

RaceHit RaceDetector::write(int w, uint32_t lanes, uint32_t begin, uint32_t end) {
  RaceHit hit = meets_copy(lanes, begin, end);
  if (hit) return hit;
  const WarpClock& c = clocks_[w];
  for (uint32_t u = begin >> unit_shift_; u << unit_shift_ < end; u++) {
    ShadowWord& s = shadow_[u];
    if (!settled(s.write, c, w) && !ordered(s.write, u, w, lanes, hit)) return report(hit, RaceHit::kWithWrite, u);
    if (!settled(s.read, c, w) && !ordered(s.read, u, w, lanes, hit)) return report(hit, RaceHit::kWithRead, u);
    s.write = {stamp(w, false), lanes};
  }
  return hit;
}

RaceHit RaceDetector::atomic(int w, uint32_t lanes, uint32_t begin, uint32_t end, bool tolerate_atomics) {
  RaceHit hit = meets_copy(lanes, begin, end);
  if (hit) return hit;
  for (uint32_t u = begin >> unit_shift_; u << unit_shift_ < end; u++) {
    ShadowWord& s = shadow_[u];
    if (s.write.stamp == 0) {
      hit.lane = __builtin_ctz(lanes);
      return report(hit, RaceHit::kUnwritten, u);
    }
    if (!s.write.atomic() && !ordered(s.write, u, w, lanes, hit)) return report(hit, RaceHit::kWithWrite, u);
    if (!tolerate_atomics && !ordered(s.read, u, w, lanes, hit)) return report(hit, RaceHit::kWithRead, u);
    record(s.write, u, w, lanes, true);
  }
  return hit;
}

}  // namespace gpu_emulator
