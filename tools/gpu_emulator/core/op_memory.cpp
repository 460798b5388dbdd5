// Loads and stores.
#include <algorithm>
#include <cstring>

#include "bind.h"
#include "memory.h"

namespace gpu_emulator {
namespace {

// kind of a load: how a narrow value is extended.
enum Extend : uint8_t { kWhole, kUnsigned8, kSigned8, kUnsigned16, kSigned16 };

uint32_t load_narrow(const uint8_t* p, uint8_t kind) {
  uint16_t half;
  memcpy(&half, p, kind >= kUnsigned16 ? 2 : 1);
  switch (kind) {
    case kUnsigned8:
      return *p;
    case kSigned8:
      return static_cast<uint32_t>(static_cast<int32_t>(static_cast<int8_t>(*p)));
    case kUnsigned16:
      return half;
    default:
      return static_cast<uint32_t>(static_cast<int32_t>(static_cast<int16_t>(half)));
  }
}

template <int words>
void load_words(Machine& m, Warp& w, const Inst& in, uint32_t mask, const uint64_t* address, Space space) {
  uint32_t (*d)[kLanes] = &w.reg[in.dst];
  auto lane = [&](int l) {
    uint32_t v[words];
    memcpy(v, host_pointer(m, w, space, address[l], l), sizeof v);
    for (int i = 0; i < words; i++) d[i][l] = v[i];
  };
  if (mask == kAllLanes) {
    for (int l = 0; l < kLanes; l++) lane(l);
  } else {
    for (uint32_t left = mask; left; left &= left - 1) lane(__builtin_ctz(left));
  }
}

void load(Machine& m, Warp& w, const Inst& in, uint32_t mask, const uint64_t* address, Space space) {
  access(m, w, in, mask, address, space, kReads);
  switch (in.width) {
    case 16:
      load_words<4>(m, w, in, mask, address, space);
      return;
    case 8:
      load_words<2>(m, w, in, mask, address, space);
      return;
    case 4:
      load_words<1>(m, w, in, mask, address, space);
      return;
  }
  for (int l = 0; l < kLanes; l++)
    if (mask >> l & 1) w.reg[in.dst][l] = load_narrow(host_pointer(m, w, space, address[l], l), in.kind);
}

void store(Machine& m, Warp& w, const Inst& in, uint32_t mask, const uint64_t* address, Space space) {
  access(m, w, in, mask, address, space, kWrites);
  // src[2] is the first register of the value; RZ stands for as many zeros as needed.
  bool zero = in.src[2].row == kZeroRegister && !in.src[2].pooled;
  const uint32_t* row = w.row(in.src[2]);
  int step = zero ? 0 : kLanes, words = std::max(1, in.width / 4);
  size_t bytes = std::min<size_t>(in.width, 4);
  for (int l = 0; l < kLanes; l++) {
    if (!(mask >> l & 1)) continue;
    uint8_t* p = host_pointer(m, w, space, address[l], l);
    for (int i = 0; i < words; i++) memcpy(p + 4 * i, &row[i * step + l], bytes);
  }
}

template <Space space, bool is_store>
void run_access(Machine& m, Warp& w, const Inst& in, uint32_t mask) {
  alignas(64) uint64_t address[kLanes];
  if (space == Space::Global) {
    global_addresses(w, in, address);
  } else {
    window_addresses(w, in, address);
  }
  if (is_store) {
    store(m, w, in, mask, address, space);
  } else {
    load(m, w, in, mask, address, space);
  }
}

template <bool is_store>
void run_generic(Machine& m, Warp& w, const Inst& in, uint32_t mask) {
  alignas(64) uint64_t address[kLanes];
  global_addresses(w, in, address);
  for_each_space(mask, address, [&](Space space, uint32_t lanes) {
    if (is_store) {
      store(m, w, in, lanes, address, space);
    } else {
      load(m, w, in, lanes, address, space);
    }
  });
}

void take_width(Binder& b) {
  Inst& in = b.inst;
  int width = b.take_one({"128", "64", "32", "U8", "S8", "U16", "S16"});
  static const uint8_t bytes[] = {16, 8, 4, 1, 1, 2, 2};
  static const uint8_t kinds[] = {kWhole, kWhole, kWhole, kUnsigned8, kSigned8, kUnsigned16, kSigned16};
  in.width = width < 0 ? 4 : bytes[width];
  in.kind = width < 0 ? static_cast<uint8_t>(kWhole) : kinds[width];
}

void take_ordering(Binder& b) {
  // Caching and ordering hints have no effect, because memory is sequentially consistent here.
  b.ignore({"SYS", "GPU", "CTA", "SM", "VC", "STRONG", "WEAK", "CONSTANT", "U", "EF", "EL", "LU", "EU", "NA", "CI",
            "CONSTANT", "LTC64B", "LTC128B", "PRIVATE"});
}

void require_aligned_register(const Inst& in, int row) {
  int words = std::max(1, in.width / 4);
  if (row < kZeroRegister && row % words) throw Unsupported("register pair or quad is not aligned");
}

void bind_load(Binder& b, Space space, bool generic) {
  Inst& in = b.inst;
  take_width(b);
  take_ordering(b);
  bool extended = b.take("E");
  in.wide_address = space == Space::Global;
  if (space == Space::Global && !extended) throw Unsupported("32-bit global address");
  b.destination();
  require_aligned_register(in, in.dst);
  b.address();
  if (generic) {
    in.run = run_generic<false>;
  } else if (space == Space::Global) {
    in.run = run_access<Space::Global, false>;
  } else if (space == Space::Shared) {
    in.run = run_access<Space::Shared, false>;
  } else {
    in.run = run_access<Space::Local, false>;
  }
}

void bind_store(Binder& b, Space space, bool generic) {
  Inst& in = b.inst;
  take_width(b);
  take_ordering(b);
  bool extended = b.take("E");
  in.wide_address = space == Space::Global;
  if (space == Space::Global && !extended) throw Unsupported("32-bit global address");
  b.address();
  b.source(2);
  if (!in.src[2].plain()) throw Unsupported("modified value");
  if (!in.src[2].pooled) require_aligned_register(in, in.src[2].row);
  if (generic) {
    in.run = run_generic<true>;
  } else if (space == Space::Global) {
    in.run = run_access<Space::Global, true>;
  } else if (space == Space::Shared) {
    in.run = run_access<Space::Shared, true>;
  } else {
    in.run = run_access<Space::Local, true>;
  }
}

// LDSM: `kind` 8 x 8 matrices of 16-bit elements. Lane 8 i + r has the address of row r of matrix i; register i of a
// lane gets two neighbours of a row of matrix i or (flags) of a column.
void run_ldsm(Machine& m, Warp& w, const Inst& in, uint32_t mask) {
  require_all_lanes(m, in, mask);
  alignas(64) uint64_t address[kLanes];
  window_addresses(w, in, address);
  const uint32_t asked = in.kind == 4 ? kAllLanes : (1u << 8 * in.kind) - 1;
  access(m, w, in, asked, address, Space::Shared, kReads | kByWarp);
  for (int i = 0; i < in.kind; i++) {
    uint16_t matrix[8][8];
    for (int r = 0; r < 8; r++) memcpy(matrix[r], m.shared.data() + address[8 * i + r], sizeof matrix[r]);
    for (int l = 0; l < kLanes; l++) {
      const int one = l / 4, two = l % 4 * 2;
      w.reg[in.dst + i][l] = in.flags ? matrix[two][one] | static_cast<uint32_t>(matrix[two + 1][one]) << 16
                                      : matrix[one][two] | static_cast<uint32_t>(matrix[one][two + 1]) << 16;
    }
  }
}

// LDSM.16.MT88.4 R4, [R13]
void bind_ldsm(Binder& b) {
  Inst& in = b.inst;
  if (!b.take("16")) throw Unsupported("element");
  const int form = b.take_one({"M88", "MT88"});
  if (form < 0) throw Unsupported("form");
  in.flags = static_cast<uint8_t>(form);
  in.kind = b.take("4") ? 4 : b.take("2") ? 2 : 1;
  in.width = 16;
  b.destination();
  b.address();
  in.run = run_ldsm;
}

// flags: constant bank.
void run_ldc(Machine& m, Warp& w, const Inst& in, uint32_t mask) {
  const uint32_t* index = w.row(in.src[0]);
  alignas(64) uint32_t out[4][kLanes] = {};
  int words = std::max(1, in.width / 4);
  for (int l = 0; l < kLanes; l++) {
    if (!(mask >> l & 1)) continue;
    uint64_t offset = static_cast<uint32_t>(index[l] + static_cast<uint32_t>(in.offset));
    const uint8_t* p = m.constant(in.flags, offset, in.width, l);
    if (in.width >= 4) {
      for (int i = 0; i < words; i++) memcpy(&out[i][l], p + 4 * i, 4);
    } else {
      out[0][l] = load_narrow(p, in.kind);
    }
  }
  for (int i = 0; i < words; i++) store_row(w, in.dst + i, out[i], mask);
  m.counters[in.index].requests++;
}

void bind_ldc(Binder& b) {
  Inst& in = b.inst;
  take_width(b);
  b.destination();
  const Operand& o = b.next();
  if (o.kind != Operand::Kind::Constant) throw Unsupported("operand " + o.text);
  if (o.indexed && o.uniform != kZeroRegister) throw Unsupported("operand " + o.text);
  in.src[0] = b.register_source(o.indexed ? o.index : o.uniform);
  in.offset = o.offset;
  in.flags = static_cast<uint8_t>(o.bank);
  in.run = run_ldc;
}

// Tests the window of a generic address. kind: 0 shared, 1 local, 2 global.
void run_qspc(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  alignas(64) uint64_t address[kLanes];
  global_addresses(w, in, address);
  uint32_t hit = 0;
  alignas(64) uint32_t out[kLanes];
  for (int l = 0; l < kLanes; l++) {
    bool shared = address[l] - kSharedWindow < kWindowBytes, local = address[l] - kLocalWindow < kWindowBytes;
    bool yes = in.kind == 0 ? shared : in.kind == 1 ? local : !shared && !local;
    hit |= static_cast<uint32_t>(yes) << l;
    out[l] = yes;
  }
  store_row(w, in.dst, out, mask);
  store_predicate(w, in.pdst[0], hit, mask);
}

void bind_qspc(Binder& b) {
  Inst& in = b.inst;
  b.take("E");
  int kind = b.take_one({"S", "L", "G"});
  if (kind < 0) throw Unsupported("space");
  in.kind = static_cast<uint8_t>(kind);
  in.wide_address = true;
  b.predicate_destination(0);
  b.destination();
  b.address();
  in.run = run_qspc;
}

}  // namespace

bool bind_memory(Binder& b) {
  const std::string& op = b.opcode;
  Kernel& k = b.kernel();
  if (op == "LDG" || op == "LD") {
    bind_load(b, Space::Global, op == "LD");
  } else if (op == "STG" || op == "ST") {
    bind_store(b, Space::Global, op == "ST");
  } else if (op == "LDS") {
    bind_load(b, Space::Shared, false);
  } else if (op == "STS") {
    bind_store(b, Space::Shared, false);
  } else if (op == "LDSM") {
    bind_ldsm(b);
  } else if (op == "LDL") {
    bind_load(b, Space::Local, false);
  } else if (op == "STL") {
    bind_store(b, Space::Local, false);
  } else if (op == "LDC") {
    bind_ldc(b);
  } else if (op == "QSPC") {
    bind_qspc(b);
  } else {
    return false;
  }
  if (op == "LDL" || op == "STL") k.uses_local = true;
  bool may_be_shared = op == "LDS" || op == "STS" || op == "LD" || op == "ST";
  if (may_be_shared && b.inst.width < 4) k.byte_shared = true;
  if (op == "LD" || op == "ST") k.uses_local = true;
  return true;
}

}  // namespace gpu_emulator
