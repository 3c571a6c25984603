#include "memory.hpp"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <string_view>
#include <vector>

namespace roundelay {

namespace {

constexpr std::size_t plenty = std::size_t{1} << 60;

// The lines of a file; none if it can't be read. By C's own means: beside a libstdc++ that another
// library has brought along, torch's for CUDA among them, C++ streams read nothing, or crash.
std::vector<std::string> lines_of(const std::string& path) {
    std::vector<std::string> lines;
    std::FILE* file = std::fopen(path.c_str(), "re");
    if (file == nullptr) return lines;
    std::string line;
    for (int next = std::fgetc(file); next != EOF; next = std::fgetc(file)) {
        if (next != '\n') {
            line.push_back(char(next));
            continue;
        }
        lines.push_back(std::move(line));
        line.clear();
    }
    if (!line.empty()) lines.push_back(std::move(line));
    std::fclose(file);
    return lines;
}

std::vector<std::string> words_of(std::string_view line) {
    std::vector<std::string> words;
    while (true) {
        line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size()));
        if (line.empty()) return words;
        const std::size_t end = std::min(line.find_first_of(" \t"), line.size());
        words.emplace_back(line.substr(0, end));
        line.remove_prefix(end);
    }
}

// The number after `key` at the beginning of a line, or `otherwise`; an empty key is the first line.
std::size_t number_in(const std::string& path, const std::string& key, std::size_t otherwise) {
    for (const std::string& line : lines_of(path)) {
        if (line.compare(0, key.size(), key) != 0) continue;
        const char* end = line.data() + line.size();
        const char* first = std::find_if(line.data() + key.size(), end, [](char c) { return c != ' '; });
        std::size_t found = 0;
        // Limits that are none are "max", or larger than there are bytes.
        return std::from_chars(first, end, found).ec == std::errc{} ? found : otherwise;
    }
    return otherwise;
}

// How the two versions of control groups call things.
struct Words {
    const char *limit, *used, *inactive, *active;
};
constexpr Words version1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ",
                         "total_active_file "};
constexpr Words version2{"memory.max", "memory.current", "inactive_file ", "active_file "};

// What one control group has left. Its cache of files is no burden: the kernel lets go of that first.
std::size_t left_in(const std::string& folder, const Words& words) {
    const std::size_t limit = number_in(folder + "/" + words.limit, "", plenty);
    if (limit >= plenty) return plenty;
    const std::size_t used = number_in(folder + "/" + words.used, "", 0);
    const std::string stat = folder + "/memory.stat";
    const std::size_t cache =
        std::min(used, number_in(stat, words.inactive, 0) + number_in(stat, words.active, 0));
    return limit - std::min(limit, used - cache);
}

bool has_word(const std::string& list, const std::string& word) {
    return ("," + list + ",").find("," + word + ",") != std::string::npos;
}

// Where in the hierarchy this process is, as /proc/self/cgroup says it; "" if nowhere.
std::string own_group(const std::string& root, bool second) {
    for (const std::string& line : lines_of(root + "/proc/self/cgroup")) {
        const std::size_t first = line.find(':'), next = line.find(':', first + 1);
        if (first == std::string::npos || next == std::string::npos) continue;
        const std::string controllers = line.substr(first + 1, next - first - 1);
        if (second ? controllers.empty() : has_word(controllers, "memory"))
            return line.substr(next + 1);
    }
    return "";
}

// The least that is left in the group of this process and in all that it lies in.
std::size_t left_up_from(const std::string& root, const std::string& mounted_at,
                         const std::string& mounted, bool second) {
    std::string group = own_group(root, second);
    // A container may see only its own part of the hierarchy: what lies above is not there to be read.
    if (mounted != "/" && group.compare(0, mounted.size(), mounted) == 0)
        group.erase(0, mounted.size());
    else if (mounted != "/" || group.find("/..") != std::string::npos)
        group.clear();
    std::size_t left = plenty;
    while (true) {
        left = std::min(left, left_in(root + mounted_at + group, second ? version2 : version1));
        const std::size_t slash = group.rfind('/');
        if (slash == std::string::npos) return left;
        group.erase(slash);
    }
}

std::size_t left_in_groups(const std::string& root) {
    std::size_t left = plenty;
    for (const std::string& line : lines_of(root + "/proc/self/mountinfo")) {
        // number parent device root mount-point options … - kind source options
        const std::vector<std::string> words = words_of(line);
        const auto dash = std::find(words.begin(), words.end(), "-");
        const std::vector<std::string> before(words.begin(), dash);
        const std::vector<std::string> after(dash == words.end() ? dash : dash + 1, words.end());
        if (before.size() < 5 || after.size() < 3) continue;
        const bool second = after[0] == "cgroup2";
        if (second || (after[0] == "cgroup" && has_word(after[2], "memory")))
            left = std::min(left, left_up_from(root, before[4], before[3], second));
    }
    return left;
}

}  // namespace

std::size_t available_memory(const std::string& root) {
    const std::size_t kib = number_in(root + "/proc/meminfo", "MemAvailable:", plenty / 1024);
    std::size_t addresses = plenty;
    rlimit own{};
    if (getrlimit(RLIMIT_AS, &own) == 0 && own.rlim_cur != RLIM_INFINITY) {
        const std::size_t mapped =
            number_in("/proc/self/statm", "", 0) * std::size_t(sysconf(_SC_PAGESIZE));
        addresses = own.rlim_cur > mapped ? std::size_t(own.rlim_cur) - mapped : 0;
    }
    return std::min({kib * 1024, left_in_groups(root), addresses});
}

}  // namespace roundelay
