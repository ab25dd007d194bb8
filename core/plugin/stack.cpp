#include "core/plugin/stack.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "core/base/text.hpp"

namespace sf {
namespace {

struct Slot {
  const char* key;
  const char* kind;
};
constexpr std::array<Slot, 5> kSlots = {{{"algorithm.name", "algorithm"},
                                         {"backend.transforms", "transform"},
                                         {"backend.sharding", "sharding"},
                                         {"backend.checkpoint", "checkpoint"},
                                         {"backend.trackers", "tracker"}}};

constexpr std::array<const char*, 1> kBuiltInWriters = {"sync"};

bool is_built_in(const std::string& kind, const std::string& name) {
  return kind == "checkpoint" &&
         std::find(kBuiltInWriters.begin(), kBuiltInWriters.end(), name) != kBuiltInWriters.end();
}

// The names that a raw value or the host's default gives to a slot. A wrong type is reported by the schema
// later.
std::vector<std::string> names_of(const Slot& slot, const RawValues& values, Place& place) {
  auto found = values.find(slot.key);
  if (found != values.end()) {
    place = found->second.place;
    const TomlNode& node = found->second.node;
    if (node.kind == TomlNode::Kind::string) {
      return {node.string};
    }
    std::vector<std::string> out;
    for (const TomlNode& item : node.items) {
      out.push_back(item.string);
    }
    return out;
  }
  for (const Option& option : host_manifest().options) {
    if (option.key == slot.key && option.default_value) {
      const auto* text = std::get_if<std::string>(&*option.default_value);
      return text != nullptr ? std::vector<std::string>{*text}
                             : std::get<std::vector<std::string>>(*option.default_value);
    }
  }
  return {};
}

std::string how_to_write(const std::string& kind, const std::string& name) {
  for (const Slot& slot : kSlots) {
    if (slot.kind == kind) {
      return kind == "transform" || kind == "tracker" ? format("{} = [\"{}\"]", slot.key, name)
                                                      : format("{} = \"{}\"", slot.key, name);
    }
  }
  return "another name: a plugin of that kind has no place in a recipe";
}

}  // namespace

std::vector<Manifest> Stack::manifests() const {
  std::vector<Manifest> out;
  for (const StackMember& member : members) {
    if (member.file != nullptr) {
      out.push_back(*member.file->manifest);
    }
  }
  return out;
}

std::set<std::string> Stack::provided() const {
  std::set<std::string> out;
  for (const Manifest& manifest : manifests()) {
    out.insert(manifest.provides.begin(), manifest.provides.end());
  }
  return out;
}

std::set<std::string> Stack::names() const {
  std::set<std::string> out;
  for (const StackMember& member : members) {
    out.insert(member.name);
  }
  return out;
}

void apply_backend_flag(const std::string& text, const Catalog& catalog, RawValues& values,
                        Diagnostics& problems) {
  std::string origin = "--backend";
  std::vector<std::string> transforms;
  std::vector<std::string> trackers;
  std::string sharding;
  std::string checkpoint;
  for (const std::string& name : split(text, '+')) {
    std::string kind = "checkpoint";
    if (!is_built_in(kind, name)) {
      const PluginFile* file = catalog.find(name, {format("{} {}", origin, text), 0, 0}, problems);
      if (file == nullptr) {
        continue;
      }
      kind = file->manifest->kind;
    }
    std::string* single = kind == "sharding" ? &sharding : kind == "checkpoint" ? &checkpoint : nullptr;
    if (kind == "transform" || kind == "tracker") {
      (kind == "transform" ? transforms : trackers).push_back(name);
    } else if (single == nullptr || !single->empty()) {
      problems.error(
          {.id = "plugin/backend-slot",
           .message =
               single == nullptr
                   ? format(
                         "\"{}\" in --backend {} is of kind {}, expected sharding, transform, checkpoint or tracker",
                         name, text, kind)
                   : format("--backend {} names two plugins of kind {}: \"{}\" and \"{}\"", text, kind,
                            *single, name),
           .fix = "for example --backend fsdp2+fp8+async_ckpt"});
    } else {
      *single = name;
    }
  }
  values["backend.transforms"] = raw_texts(transforms, origin);
  if (!trackers.empty()) {
    values["backend.trackers"] = raw_texts(trackers, origin);
  }
  if (!sharding.empty()) {
    values["backend.sharding"] = raw_text(sharding, origin);
  }
  if (!checkpoint.empty()) {
    values["backend.checkpoint"] = raw_text(checkpoint, origin);
  }
}

Stack pick_stack(const RawValues& values, const Catalog& catalog, Diagnostics& problems) {
  Stack out;
  for (const Slot& slot : kSlots) {
    Place place;
    for (const std::string& name : names_of(slot, values, place)) {
      StackMember member{slot.kind, slot.key, name, nullptr};
      if (!is_built_in(slot.kind, name)) {
        member.file = catalog.find(name, place, problems);
        if (member.file != nullptr && member.file->manifest->kind != slot.kind) {
          problems.error({.id = "plugin/wrong-kind",
                          .message = format("{} names \"{}\", which is of kind {}, expected {}", slot.key,
                                            name, member.file->manifest->kind, slot.kind),
                          .place = place,
                          .fix = "write " + how_to_write(member.file->manifest->kind, name)});
          member.file = nullptr;
        }
        if (member.file == nullptr) {
          out.is_complete = false;
          continue;
        }
      }
      bool is_twice = std::any_of(out.members.begin(), out.members.end(),
                                  [&](const StackMember& other) { return other.name == name; });
      if (is_twice) {
        problems.error({.id = "plugin/twice",
                        .message = format("{} names \"{}\" twice", slot.key, name),
                        .place = place,
                        .fix = "name it once"});
        continue;
      }
      out.members.push_back(std::move(member));
    }
  }
  return out;
}

}  // namespace sf
