#include "core/plugin/backend_options.hpp"

#include <algorithm>

#include "core/base/error.hpp"
#include "core/base/text.hpp"

namespace sf {

// Called through C: nothing may be thrown. A wrong name or type is the plugin's mistake.
template <class T>
const T* BackendOptions::claim(void* self, const char* name) {
  auto& options = *static_cast<BackendOptions*>(self);
  auto found = options.entries_.find(name);
  const T* value = found == options.entries_.end() ? nullptr : std::get_if<T>(&found->second.value.value);
  if (value == nullptr) {
    options.misread_.emplace_back(name);
    return nullptr;
  }
  found->second.is_claimed = true;
  return value;
}

BackendOptions::BackendOptions(const Manifest& manifest, const PlanValues& values) : plugin_(manifest.name) {
  std::vector<const Option*> options;
  for (const Option& option : manifest.options) {
    options.push_back(&option);
  }
  for (const Option& option : host_manifest().options) {
    if (std::find(manifest.claims.begin(), manifest.claims.end(), option.key) != manifest.claims.end()) {
      options.push_back(&option);
    }
  }
  for (const Option* option : options) {
    auto found = values.find(option->key);
    SF_CHECK(found != values.end(), "plan lacks option {}", option->key);
    Entry& entry = entries_[option->name];
    entry.key = option->key;
    entry.value = found->second;
    entry.is_default = option->default_value && *option->default_value == entry.value.value;
    entry.list.struct_size = sizeof(sf_list);
    if (const auto* ints = std::get_if<std::vector<std::int64_t>>(&entry.value.value)) {
      entry.list.type = SF_LIST_INTS;
      entry.list.count = ints->size();
      entry.list.ints = ints->data();
    } else if (const auto* floats = std::get_if<std::vector<double>>(&entry.value.value)) {
      entry.list.type = SF_LIST_FLOATS;
      entry.list.count = floats->size();
      entry.list.floats = floats->data();
    } else if (const auto* strings = std::get_if<std::vector<std::string>>(&entry.value.value)) {
      for (const std::string& text : *strings) {
        entry.texts.push_back(text.c_str());
      }
      entry.list.type = SF_LIST_STRINGS;
      entry.list.count = strings->size();
      entry.list.strings = entry.texts.data();
    }
  }
  table_.struct_size = sizeof(sf_options);
  table_.ctx = this;
  table_.get_bool = [](void* self, const char* name, std::int32_t* out) -> std::int32_t {
    const bool* value = claim<bool>(self, name);
    return value == nullptr ? SF_INTERNAL : (*out = *value ? 1 : 0, SF_OK);
  };
  table_.get_int = [](void* self, const char* name, std::int64_t* out) -> std::int32_t {
    const std::int64_t* value = claim<std::int64_t>(self, name);
    return value == nullptr ? SF_INTERNAL : (*out = *value, SF_OK);
  };
  table_.get_float = [](void* self, const char* name, double* out) -> std::int32_t {
    const double* value = claim<double>(self, name);
    return value == nullptr ? SF_INTERNAL : (*out = *value, SF_OK);
  };
  table_.get_string = [](void* self, const char* name, const char** out) -> std::int32_t {
    const std::string* value = claim<std::string>(self, name);
    return value == nullptr ? SF_INTERNAL : (*out = value->c_str(), SF_OK);
  };
  table_.get_list = [](void* self, const char* name, const sf_list** out) -> std::int32_t {
    auto& mine = *static_cast<BackendOptions*>(self);
    auto found = mine.entries_.find(name);
    if (found == mine.entries_.end() || found->second.list.type == 0) {
      mine.misread_.emplace_back(name);
      return SF_INTERNAL;
    }
    found->second.is_claimed = true;
    *out = &found->second.list;
    return SF_OK;
  };
  table_.report_effect = [](void* self, const char* name, std::int64_t count) -> std::int32_t {
    auto& entries = static_cast<BackendOptions*>(self)->entries_;
    auto found = entries.find(name);
    if (found == entries.end() || count < 0) {
      return SF_INTERNAL;
    }
    found->second.effect = (found->second.effect < 0 ? 0 : found->second.effect) + count;
    return SF_OK;
  };
}

bool BackendOptions::is_claimed(const std::string& name) const {
  return entries_.at(name).is_claimed;
}
std::int64_t BackendOptions::effect(const std::string& name) const {
  return entries_.at(name).effect;
}

std::vector<std::string> BackendOptions::in_effect() const {
  std::vector<std::string> out;
  for (const auto& [name, entry] : entries_) {
    if (!entry.is_default && entry.effect > 0) {
      out.push_back(format("{} = {} ({})", entry.key, toml_text(entry.value.value), entry.effect));
    }
  }
  return out;
}

void BackendOptions::check_claims(Diagnostics& problems) const {
  for (const auto& [name, entry] : entries_) {
    if (entry.value.is_set && !entry.is_claimed) {
      problems.error(
          {.id = "plugin/option-unclaimed",
           .message = format("{} was asked for, but plugin \"{}\" never read it", entry.key, plugin_),
           .place = entry.value.place,
           .why = "an option that nobody reads would be lost in silence",
           .fix = "remove the key, or report this to the plugin's authors"});
    }
  }
}

void BackendOptions::check_effects(Diagnostics& problems) const {
  for (const auto& [name, entry] : entries_) {
    if (entry.value.is_set && !entry.is_default && entry.effect == 0) {
      problems.error(
          {.id = "plugin/option-no-effect",
           .message = format("{} was asked for, but nothing in this model is changed by it", entry.key),
           .place = entry.value.place,
           .why = format("plugin \"{}\" found nothing to apply it to", plugin_),
           .fix = "remove the key, or choose a model that it applies to"});
    }
  }
}

}  // namespace sf
