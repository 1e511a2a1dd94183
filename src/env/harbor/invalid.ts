import { LonghaulError } from '../../core/index.ts';

/** `TaskInvalid` that names the file, the key or line inside it, and what is expected there. */
export function taskInvalid(file: string, where: string | null, expected: string): LonghaulError {
  return new LonghaulError(
    'TaskInvalid',
    where === null ? `${file}: ${expected}` : `${file}: ${where}: ${expected}`,
  );
}

/** `CapabilityMissing` for what the format allows and this version cannot give. */
export function notSupported(
  file: string,
  where: string,
  what: string,
  next: string,
): LonghaulError {
  return new LonghaulError('CapabilityMissing', `${file}: ${where}: ${what}`, { next });
}
