//! The memory that this process can still allocate: the system's available memory, within the limits of the process's
//! control groups.
//!
//! A container, a Slurm job or a systemd scope limits memory in the process's group or in a group above it, through
//! version 1 or 2 of the kernel's interface, and does not always have its own view of the file system. Therefore, the
//! group is found through `/proc/self/cgroup` and `/proc/self/mountinfo`.

use std::path::{Path, PathBuf};

/// The memory limit of a control group, and the memory that is left within it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CgroupLimit {
    limit: u64,
    /// The bytes that can still be allocated. The page cache counts as free because it is reclaimable.
    remaining: u64,
}

/// Returns the number of bytes that this process can still allocate, or 0 if the system does not report this number.
/// The page cache counts as free.
#[doc(hidden)]
pub fn available_memory() -> u64 {
    available(&read_file)
}

/// Returns the memory limit set by this process's control groups, if there is one.
#[doc(hidden)]
pub fn group_limit() -> Option<u64> {
    tightest(&groups(&read_file), |group| group.limit)
}

fn read_file(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

type FileReader<'a> = &'a dyn Fn(&Path) -> Option<String>;

fn available(read: FileReader<'_>) -> u64 {
    let meminfo = read(Path::new("/proc/meminfo")).unwrap_or_default();
    let kib = |text: &str| text.trim().strip_suffix("kB")?.trim().parse::<u64>().ok();
    let system = meminfo.lines().find_map(|line| kib(line.strip_prefix("MemAvailable:")?)).unwrap_or(0);
    let remaining = tightest(&groups(read), |group| group.remaining);
    system.saturating_mul(1024).min(remaining.unwrap_or(u64::MAX))
}

fn tightest(groups: &[CgroupLimit], value: impl Fn(&CgroupLimit) -> u64) -> Option<u64> {
    groups.iter().map(value).min()
}

/// Returns the groups of this process that limit its memory: its own and those above it, in both versions of the
/// interface.
fn groups(read: FileReader<'_>) -> Vec<CgroupLimit> {
    let mounts = read(Path::new("/proc/self/mountinfo")).unwrap_or_default();
    let mounts: Vec<CgroupMount> = mounts.lines().filter_map(CgroupMount::read).collect();
    let cgroups = read(Path::new("/proc/self/cgroup")).unwrap_or_default();
    let mut limits = Vec::new();
    for line in cgroups.lines() {
        // A line has the form number:controllers:path.
        let mut words = line.splitn(3, ':');
        let (Some(number), Some(controllers), Some(path)) = (words.next(), words.next(), words.next()) else {
            continue;
        };
        let version = match () {
            () if number == "0" && controllers.is_empty() => CgroupVersion::Two,
            () if controllers.split(',').any(|name| name == "memory") => CgroupVersion::One,
            () => continue,
        };
        for mount in mounts.iter().filter(|mount| mount.version == version) {
            let folders = mount.folders(path);
            limits.extend(folders.iter().filter_map(|folder| version.group(folder, read)));
        }
    }
    limits
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CgroupVersion {
    One,
    Two,
}

/// A mounted hierarchy of groups that may limit memory.
#[derive(Debug)]
struct CgroupMount {
    version: CgroupVersion,
    /// The group that is visible at the mount point.
    root: PathBuf,
    point: PathBuf,
}

impl CgroupMount {
    /// Reads a line of `mountinfo`: number, parent, device, root, mount point, options, ..., `-`, type, source,
    /// options.
    fn read(line: &str) -> Option<Self> {
        let (mount_fields, type_fields) = line.split_once(" - ")?;
        let mut type_fields = type_fields.split(' ');
        let version = match type_fields.next()? {
            "cgroup2" => CgroupVersion::Two,
            "cgroup" if type_fields.nth(1)?.split(',').any(|option| option == "memory") => CgroupVersion::One,
            _ => return None,
        };
        let mut mount_fields = mount_fields.split(' ').skip(3).map(unescaped);
        Some(Self { version, root: mount_fields.next()?.into(), point: mount_fields.next()?.into() })
    }

    /// Returns the folders of the group `path` and of the groups above it that this mount shows.
    fn folders(&self, path: &str) -> Vec<PathBuf> {
        let path = Path::new(path);
        // A path that is not below the mounted group, or leads out of that group, belongs to a different view of the
        // hierarchy.
        let below = path.strip_prefix(&self.root).ok().filter(|below| !below.iter().any(|word| word == ".."));
        let below = below.unwrap_or(Path::new(""));
        below.ancestors().map(|below| self.point.join(below)).collect()
    }
}

/// Decodes a word of `mountinfo`, in which spaces are written as `\040`.
fn unescaped(word: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(word.to_owned(), |text, (code, character)| text.replace(code, character))
}

impl CgroupVersion {
    /// Returns the limit of the group in `folder`, if it limits memory.
    fn group(self, folder: &Path, read: FileReader<'_>) -> Option<CgroupLimit> {
        let number = |name: &str| read(&folder.join(name))?.trim().parse::<u64>().ok();
        let (limits, used, cached): (&[&str], _, [&str; 2]) = match self {
            // Above `memory.high`, the kernel throttles a group so much that its processes hardly run.
            Self::Two => (&["memory.max", "memory.high"], "memory.current", ["inactive_file", "active_file"]),
            Self::One => {
                (&["memory.limit_in_bytes"], "memory.usage_in_bytes", ["total_inactive_file", "total_active_file"])
            }
        };
        // Version 1 expresses "no limit" by a number close to the largest possible one.
        let limit = limits.iter().filter_map(|name| number(name)).min().filter(|limit| *limit < 1 << 60)?;
        let stat = read(&folder.join("memory.stat")).unwrap_or_default();
        let lines = stat.lines().filter_map(|line| line.split_once(' ')).filter(|(name, _)| cached.contains(name));
        let cache: u64 = lines.filter_map(|(_, bytes)| bytes.trim().parse::<u64>().ok()).sum();
        let used = number(used).unwrap_or(0).saturating_sub(cache);
        Some(CgroupLimit { limit, remaining: limit.saturating_sub(used) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: (&str, &str) = ("/proc/meminfo", "MemTotal: 64000000 kB\nMemAvailable: 1000000 kB\n");
    const SYSTEM: u64 = 1_024_000_000;

    /// Returns the available bytes, and the limit, on a system with these files.
    fn memory_on(files: &[(&str, &str)]) -> (u64, Option<u64>) {
        let read = |path: &Path| {
            let mut entries = files.iter().chain([&MEMINFO]);
            entries.find(|(name, _)| Path::new(name) == path).map(|(_, text)| text.to_string())
        };
        (available(&read), tightest(&groups(&read), |group| group.limit))
    }

    #[test]
    fn without_groups_the_system_counts_and_without_files_nothing_is_promised() {
        assert_eq!(memory_on(&[]), (SYSTEM, None));
        assert_eq!(available(&|_: &Path| None), 0);
        let unlimited = [
            ("/proc/self/cgroup", "0::/user.slice\n"),
            ("/proc/self/mountinfo", "25 1 0:22 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n"),
            ("/sys/fs/cgroup/user.slice/memory.max", "max\n"),
        ];
        assert_eq!(memory_on(&unlimited), (SYSTEM, None));
    }

    #[test]
    fn a_nested_group_of_version_2_is_limited_by_itself_and_by_those_above() {
        let mounts = "24 1 0:21 / /proc rw - proc proc rw\n25 1 0:22 / /sys/fs/cgroup rw,nosuid shared:4 master:1 - cgroup2 cgroup2 rw\n";
        let job = "/sys/fs/cgroup/system.slice/slurm/job_7";
        let files = |own: &'static str, above: &'static str| {
            vec![
                ("/proc/self/cgroup".to_string(), "0::/system.slice/slurm/job_7/step_0"),
                ("/proc/self/mountinfo".to_string(), mounts),
                (format!("{job}/step_0/memory.max"), own),
                (format!("{job}/memory.max"), above),
                (format!("{job}/memory.current"), "300000000"),
                (format!("{job}/memory.stat"), "anon 1\ninactive_file 60000000\nactive_file 40000000\n"),
            ]
        };
        let on_these = |files: Vec<(String, &str)>| {
            memory_on(&files.iter().map(|(name, text)| (name.as_str(), *text)).collect::<Vec<_>>())
        };
        assert_eq!(on_these(files("max", "500000000")), (300_000_000, Some(500_000_000)), "cached files count as free");
        assert_eq!(on_these(files("100000000", "500000000")), (100_000_000, Some(100_000_000)));
        assert_eq!(on_these(files("max", "200000000")), (0, Some(200_000_000)), "the limit is used up");
        let mut high = files("max", "max");
        high.push((format!("{job}/memory.high"), "700000000"));
        assert_eq!(on_these(high), (500_000_000, Some(700_000_000)));
    }

    #[test]
    fn a_group_of_version_1_is_read_where_its_controller_is_mounted() {
        let files = [
            ("/proc/self/cgroup", "9:name=systemd:/\n4:memory:/box/7\n1:cpu:/\n0::/\n"),
            (
                "/proc/self/mountinfo",
                "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                 35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                 41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
            ),
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("/sys/fs/cgroup/memory/box/7/memory.limit_in_bytes", "400000000\n"),
            ("/sys/fs/cgroup/memory/box/7/memory.usage_in_bytes", "150000000\n"),
            ("/sys/fs/cgroup/memory/box/7/memory.stat", "cache 5\ntotal_inactive_file 20\ntotal_active_file 30\n"),
        ];
        assert_eq!(memory_on(&files), (250_000_050, Some(400_000_000)));
    }

    #[test]
    fn a_view_of_its_own_shows_the_group_at_the_mount_point() {
        // The container's group is mounted as the root, while the process sees the path outside the container.
        for (cgroup_line, root) in
            [("0::/", "/"), ("0::/docker/abc", "/docker/abc"), ("0::/../other", "/"), ("0::/x", "/docker/abc")]
        {
            let mounts = format!("25 1 0:22 {root} /mnt/my\\040groups rw - cgroup2 none rw\n");
            let files = [
                ("/proc/self/cgroup", cgroup_line),
                ("/proc/self/mountinfo", &mounts),
                ("/mnt/my groups/memory.max", "90000000"),
            ];
            assert_eq!(memory_on(&files), (90_000_000, Some(90_000_000)), "{cgroup_line} {root}");
        }
    }
}
