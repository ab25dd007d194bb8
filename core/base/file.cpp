#include "core/base/file.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "core/base/text.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

namespace sf {
namespace {

[[noreturn]] void fail(ExitCode code, const char* doing, const std::filesystem::path& path) {
  int number = errno;
  std::string hint;
  switch (number) {
    case ENOENT:
      hint = "check the path; nothing is there";
      break;
    case EACCES:
    case EPERM:
    case EROFS:
      hint = "check the permissions of the file and its folder";
      break;
    case ENOSPC:
    case EDQUOT:
      hint = "free some space on this disk, or choose another one";
      break;
    case EFBIG:
      hint = "raise the limit on the size of files (ulimit -f), or choose a file system that takes larger ones";
      break;
    case EISDIR:
      hint = "name a file; a folder is there";
      break;
    case ENOTDIR:
      hint = "check the path; a part of it is a file and no folder";
      break;
    default:
      break;
  }
  throw Error(code, format("{} \"{}\": {}", doing, path, std::generic_category().message(number)), hint);
}

// A file descriptor that is closed at the end of its scope.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (number_ >= 0) {
      close(number_);
    }
  }
  [[nodiscard]] int number() const { return number_; }
  [[nodiscard]] int release() { return std::exchange(number_, -1); }

 private:
  int number_;
};

// A file that is open for reading, and its size; a folder is refused.
class ReadableFile {
 public:
  ReadableFile(const std::filesystem::path& path, ExitCode code) : file_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (file_.number() < 0) {
      fail(code, "opening", path);
    }
    struct stat info {};
    if (fstat(file_.number(), &info) != 0) {
      fail(code, "reading", path);
    }
    if (S_ISDIR(info.st_mode)) {
      errno = EISDIR;
      fail(code, "reading", path);
    }
    bytes_ = static_cast<std::size_t>(std::max<off_t>(info.st_size, 0));
    is_regular_ = S_ISREG(info.st_mode);
  }
  [[nodiscard]] int number() const { return file_.number(); }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }  // 0 for a pipe
  [[nodiscard]] bool is_regular() const { return is_regular_; }

 private:
  Descriptor file_;
  std::size_t bytes_ = 0;
  bool is_regular_ = false;
};

void write_all(int descriptor, std::string_view bytes, ExitCode code, const std::filesystem::path& path) {
  while (!bytes.empty()) {
    ssize_t written = write(descriptor, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) {
      continue;
    }
    if (written <= 0) {
      errno = written == 0 ? ENOSPC : errno;
      fail(code, "writing", path);
    }
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
}

}  // namespace

std::string read_file(const std::filesystem::path& path, ExitCode code) {
  ReadableFile file(path, code);
  std::string out(file.bytes(), '\0');
  std::size_t filled = 0;
  for (;;) {
    if (filled == out.size()) {
      out.resize(out.size() + 4096);  // pipes and files that grow
    }
    ssize_t got = read(file.number(), out.data() + filled, out.size() - filled);
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got < 0) {
      fail(code, "reading", path);
    }
    if (got == 0) {
      break;
    }
    filled += static_cast<std::size_t>(got);
  }
  out.resize(filled);
  return out;
}

void atomic_write(const std::filesystem::path& path, std::string_view bytes, ExitCode code) {
  std::filesystem::path partial = path;
  partial += format(".partial-{}", static_cast<std::int64_t>(getpid()));
  try {
    Descriptor file(open(partial.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
    if (file.number() < 0) {
      fail(code, "creating", partial);
    }
    write_all(file.number(), bytes, code, path);
    if (fsync(file.number()) != 0 || close(file.release()) != 0) {
      fail(code, "writing", path);
    }
    if (rename(partial.c_str(), path.c_str()) != 0) {
      fail(code, "renaming to", path);
    }
  } catch (...) {
    unlink(partial.c_str());
    throw;
  }
  sync_path(path.has_parent_path() ? path.parent_path() : std::filesystem::path("."), code);
}

void sync_path(const std::filesystem::path& path, ExitCode code) {
  Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.number() < 0) {
    fail(code, "opening", path);
  }
  if (fsync(file.number()) != 0 && errno != EINVAL) {  // EINVAL: the file system has no sync for folders
    fail(code, "syncing", path);
  }
}

std::uint64_t free_bytes(const std::filesystem::path& path) {
  std::filesystem::path folder = std::filesystem::absolute(path);
  std::error_code ignored;
  while (!std::filesystem::exists(folder, ignored) && folder.has_relative_path()) {
    folder = folder.parent_path();
  }
  struct statvfs info {};
  if (statvfs(folder.c_str(), &info) != 0) {
    fail(ExitCode::kData, "asking for free space of", folder);
  }
  return static_cast<std::uint64_t>(info.f_bavail) * info.f_frsize;
}

MappedFile::MappedFile(const std::filesystem::path& path, ExitCode code) {
  ReadableFile file(path, code);
  if (!file.is_regular()) {  // it would look like an empty file
    throw Error(code, format("reading \"{}\": it is a pipe or a device, a file is expected", path), "write it to a file first, and name that");
  }
  size_ = file.bytes();
  if (size_ == 0) {
    return;
  }
  void* mapped = mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.number(), 0);
  if (mapped == MAP_FAILED) {
    size_ = 0;
    fail(code, "mapping", path);
  }
  data_ = static_cast<const std::byte*>(mapped);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) {
    munmap(const_cast<std::byte*>(data_), size_);
  }
}

std::string sha256(std::string_view text) {
  Sha256 sum;
  sum.add(text);
  return sum.hex();
}

std::string sha256(std::span<const std::byte> bytes) {
  Sha256 sum;
  sum.add(bytes);
  return sum.hex();
}

std::string sha256_file(const std::filesystem::path& path, ExitCode code) {
  return sha256(MappedFile(path, code).bytes());
}

FolderLock::FolderLock(const std::filesystem::path& folder, ExitCode code, const std::string& what, const std::string& hint) {
  Descriptor descriptor(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (descriptor.number() < 0) {
    fail(code, "opening", folder);
  }
  if (flock(descriptor.number(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) {
      fail(code, "locking", folder);
    }
    throw Error(code, format("{}: {}", folder, what), hint);
  }
  descriptor_ = descriptor.release();
}

FolderLock::~FolderLock() { close(descriptor_); }

}  // namespace sf
