//! The operating system's figures for this process's memory.

/// Returns the peak resident memory of this process in bytes (`VmHWM` of /proc/self/status), or `None` if the system
/// does not report it.
pub fn rss_peak_bytes() -> Option<u64> {
    bytes_of("VmHWM:", &std::fs::read_to_string("/proc/self/status").ok()?)
}

/// Returns the current resident memory of this process in bytes (`VmRSS`), or `None` if the system does not report it.
pub fn rss_bytes() -> Option<u64> {
    bytes_of("VmRSS:", &std::fs::read_to_string("/proc/self/status").ok()?)
}

/// Returns the memory in bytes that this process can still allocate: the system's available memory, within the limits
/// of the process's control groups (of a container, or of a job). Returns `None` if the system does not report it.
pub fn available_memory() -> Option<u64> {
    Some(crate::offload::available_memory()).filter(|bytes| *bytes > 0)
}

/// Returns the memory in bytes that this process may still allocate within its own limits (`RLIMIT_DATA` and
/// `RLIMIT_AS`: `ulimit -d` and `ulimit -v`), or `None` if there is no limit or the system does not report it.
pub fn process_limit() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let remaining = |resource, name| {
        let limit = rustix::process::getrlimit(resource).current?;
        Some(limit.saturating_sub(bytes_of(name, &status)?))
    };
    use rustix::process::Resource;
    [remaining(Resource::Data, "VmData:"), remaining(Resource::As, "VmSize:")].into_iter().flatten().min()
}

fn bytes_of(name: &str, status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_read_in_bytes_and_absence_is_none() {
        let status = "Name:\tx\nVmPeak:\t  900 kB\nVmHWM:\t     136 kB\nVmRSS:\t 1 kB\n";
        assert_eq!([bytes_of("VmHWM:", status), bytes_of("VmRSS:", status)], [Some(136 * 1024), Some(1024)]);
        assert_eq!(bytes_of("VmHWM:", "Name:\tx\n"), None);
        assert_eq!(bytes_of("VmHWM:", "VmHWM:\t many kB\n"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn memory_that_was_touched_shows() {
        let block = std::hint::black_box(vec![1u8; 32 << 20]);
        assert!(rss_peak_bytes().is_some_and(|peak| peak > block.len() as u64));
        assert!(rss_bytes().is_some_and(|now| now > block.len() as u64));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_limit_of_the_process_is_what_is_left_of_the_narrowest() {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        // Large enough not to affect the tests that run in parallel.
        const WIDE: u64 = 16 << 40;
        let previous = [Resource::Data, Resource::As].map(|resource| (resource, getrlimit(resource)));
        let set = |resource, maximum, current| setrlimit(resource, Rlimit { current, maximum }).expect("a lower limit");
        for (i, (resource, limit)) in previous.iter().enumerate() {
            let bytes = WIDE << i;
            set(*resource, limit.maximum, Some(bytes));
            let remaining = process_limit().expect("a limit");
            let narrowest = if i == 0 { bytes } else { WIDE };
            assert!(remaining < narrowest && remaining > narrowest / 2, "{remaining} of {narrowest}");
        }
        set(previous[0].0, previous[0].1.maximum, previous[0].1.current);
        assert!(process_limit().is_some_and(|remaining| remaining < 2 * WIDE && remaining > WIDE));
        set(previous[1].0, previous[1].1.maximum, previous[1].1.current);
    }
}
